use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use husk_proto::fds::{self, FdSender};
use tonic::Code;

use super::*;

fn image() -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    file
}

async fn disk(sender: &FdSender) -> pb::Disk {
    pb::Disk {
        id: "data".into(),
        file: Some(sender.send_one(image().as_fd()).await.unwrap().into()),
        serial: "S1".into(),
        ..Default::default()
    }
}

fn channel() -> (FdSender, FdReceiver) {
    let (sender, receiver) = fds::socketpair().unwrap();
    (FdSender::new(sender).unwrap(), FdReceiver::new(receiver).unwrap())
}

async fn open(fds: &FdReceiver, field: &str, disk: &pb::Disk) -> Result<Disk, Status> {
    take_image(fds, field, disk).await?.await
}

async fn scsi_unit(fds: &FdReceiver, field: &str, scsi: &pb::ScsiDisk) -> Result<NewUnit, Status> {
    take_unit(fds, field, scsi).await?.await
}

#[tokio::test]
async fn a_scsi_disk_has_the_properties_of_its_request() {
    let (sender, fds) = channel();
    let custom = pb::block_size::Custom {
        logical: 4096,
        physical: 4096,
    };
    let scsi = pb::ScsiDisk {
        disk: Some(pb::Disk {
            block_size: Some(pb::BlockSize {
                size: Some(Size::Custom(custom)),
            }),
            error_policy: pb_disk::ErrorPolicy::Enospace.into(),
            preallocated: true,
            ..disk(&sender).await
        }),
        target: 255,
        lun: Some(16_383),
        shareable: true,
        ..Default::default()
    };
    let unit = scsi_unit(&fds, "disk", &scsi).await.unwrap();
    assert_eq!(
        (&unit.id[..], &unit.serial[..], unit.shareable),
        ("data", "S1", true)
    );
    assert_eq!((unit.address.target, unit.address.lun.number()), (255, 16_383));
    let Medium::Disk(disk) = unit.medium else { panic!() };
    assert_eq!(disk.geometry().logical_block, 4096);
    assert!(disk.geometry().preallocated);
    assert_eq!(disk.error_policy(), ErrorPolicy::NoSpace);
}

#[tokio::test]
async fn a_drive_is_read_only_and_may_be_empty() {
    let (sender, fds) = channel();
    let mut scsi = pb::ScsiDisk {
        disk: Some(disk(&sender).await),
        lun: Some(0),
        r#type: Type::Cdrom.into(),
        ..Default::default()
    };
    let unit = scsi_unit(&fds, "disk", &scsi).await.unwrap();
    let Medium::CdRom(Some(disc)) = unit.medium else {
        panic!()
    };
    assert!(disc.geometry().read_only);
    scsi.disk.as_mut().unwrap().file = None;
    let unit = scsi_unit(&fds, "disk", &scsi).await.unwrap();
    assert!(matches!(unit.medium, Medium::CdRom(None)));
    scsi.r#type = Type::Disk.into();
    let error = scsi_unit(&fds, "disk", &scsi).await.unwrap_err();
    assert_eq!(error.message(), "disk.disk.file is missing");
}

#[tokio::test]
async fn errors_name_the_field() {
    let (_sender, fds) = channel();
    let none = pb::ScsiDisk::default();
    let some = pb::ScsiDisk {
        disk: Some(pb::Disk::default()),
        lun: Some(0),
        ..Default::default()
    };
    let (controller, target) = (1, 256);
    for (scsi, words) in [
        (none, "config.scsi_disks[3].disk is missing"),
        (
            pb::ScsiDisk {
                controller,
                ..some.clone()
            },
            "config.scsi_disks[3].controller: there is no controller 1",
        ),
        (
            pb::ScsiDisk {
                target,
                ..some.clone()
            },
            "config.scsi_disks[3].target: out of range",
        ),
        (
            pb::ScsiDisk {
                lun: Some(16_384),
                ..some.clone()
            },
            "config.scsi_disks[3].lun: out of range",
        ),
        (
            pb::ScsiDisk {
                lun: None,
                ..some.clone()
            },
            "config.scsi_disks[3].lun is missing",
        ),
    ] {
        let error = scsi_unit(&fds, "config.scsi_disks[3]", &scsi).await.unwrap_err();
        assert_eq!(error.message(), words);
    }
}

fn with_base(disk: pb::Disk, base: pb::Fd) -> pb::Disk {
    pb::Disk {
        format: pb_disk::Format::Qcow2.into(),
        base: Some(base),
        new_overlay: true,
        ..disk
    }
}

#[tokio::test]
async fn an_overlay_has_a_base() {
    let (sender, fds) = channel();
    let send = async |file: &File| pb::Fd::from(sender.send_one(file.as_fd()).await.unwrap());
    let empty = || tempfile::tempfile().unwrap();
    let (base, overlay) = (image(), empty());
    let plain = pb::Disk {
        file: Some(send(&overlay).await),
        ..disk(&sender).await
    };
    let new = with_base(plain, send(&base).await);
    let opened = open(&fds, "disk", &new).await.unwrap();
    assert_eq!(opened.size(), 1 << 20);
    drop(opened);

    // The same overlay once more, and as a base, which has to be whole by itself.
    let again = pb::Disk {
        file: Some(send(&overlay).await),
        base: Some(send(&base).await),
        new_overlay: false,
        ..new.clone()
    };
    assert_eq!(open(&fds, "disk", &again).await.unwrap().size(), 1 << 20);
    overlay.write_all_at(&104u64.to_be_bytes(), 8).unwrap();
    let chain = pb::Disk {
        file: Some(send(&empty()).await),
        base: Some(send(&overlay).await),
        base_format: pb_disk::Format::Qcow2.into(),
        ..new.clone()
    };
    let refused = open(&fds, "disk", &chain).await.unwrap_err();
    let fault = pb::DiskFault::from_status(&refused).unwrap();
    assert_eq!(
        (&fault.disk[..], &fault.reason[..]),
        ("data", "qcow2: it names a backing file")
    );
    assert_eq!(
        refused.message(),
        "disk: disk \"data\": qcow2: it names a backing file"
    );

    for (disk, words) in [
        (
            pb::Disk {
                file: Some(send(&empty()).await),
                base: None,
                ..new.clone()
            },
            "disk.base is missing",
        ),
        (
            pb::Disk {
                file: Some(send(&empty()).await),
                base: Some(send(&base).await),
                format: pb_disk::Format::Raw.into(),
                ..new.clone()
            },
            "disk.format: a raw disk cannot be an overlay",
        ),
    ] {
        assert_eq!(open(&fds, "disk", &disk).await.unwrap_err().message(), words);
    }
}

#[tokio::test]
async fn a_raw_disk_is_never_probed() {
    let (sender, fds) = channel();
    let file = image();
    file.write_all_at(b"QFI\xfb\0\0\0\x03", 0).unwrap();
    let disk = pb::Disk {
        file: Some(sender.send_one(file.as_fd()).await.unwrap().into()),
        ..disk(&sender).await
    };
    let opened = open(&fds, "disk", &disk).await.unwrap();
    let mut head = [0; 4];
    opened.reader().read_at(0, &mut head).unwrap();
    assert_eq!((opened.size(), &head), (1 << 20, b"QFI\xfb"));
}

#[test]
fn errors_have_their_codes() {
    let address = UnitAddress {
        target: 0,
        lun: Lun::new(1).unwrap(),
    };
    for (error, code) in [
        (ScsiError::Target(1, 0), Code::InvalidArgument),
        (ScsiError::Occupied(address, "x".into()), Code::AlreadyExists),
        (ScsiError::NotReleased(address), Code::FailedPrecondition),
        (ScsiError::NotFound("x".into()), Code::NotFound),
        (ScsiError::Full(0), Code::ResourceExhausted),
        (ScsiError::Loaded("x".into()), Code::AlreadyExists),
        (ScsiError::Prevented("x".into()), Code::FailedPrecondition),
        (ScsiError::Gone, Code::Unavailable),
        (
            ScsiError::Io("x".into(), io::ErrorKind::Unsupported.into()),
            Code::FailedPrecondition,
        ),
    ] {
        assert_eq!(status(&error).code(), code);
    }
}
