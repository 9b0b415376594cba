//! SCSI disks: at start, added, resized and removed.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use husk_proto::vmm::v1::disk::Format;
use husk_proto::vmm::v1::scsi_disk::Type;
use husk_proto::vmm::v1::{self as pb};
use tonic::{Code, Status};

use super::guest::{elf, halt, print, reset};
use super::rig::Rig;

const MIB: u64 = 1 << 20;

fn image(mib: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(mib * MIB).unwrap();
    file
}

impl Rig {
    async fn scsi_disk(&self, id: &str, lun: u32, image: &File) -> pb::ScsiDisk {
        pb::ScsiDisk {
            disk: Some(pb::Disk {
                id: id.into(),
                file: Some(self.send(image).await),
                serial: format!("S-{id}"),
                ..Default::default()
            }),
            lun: Some(lun),
            ..Default::default()
        }
    }

    async fn add(&mut self, id: &str, lun: u32, image: &File) -> Result<(), Status> {
        let disk = self.scsi_disk(id, lun, image).await;
        self.add_disk(disk).await
    }

    async fn add_disk(&mut self, disk: pb::ScsiDisk) -> Result<(), Status> {
        let named = disk.lun;
        let added = self.plug(disk).await?;
        assert_eq!(Some(added), named);
        Ok(())
    }

    /// Returns the disk's LUN.
    async fn plug(&mut self, disk: pb::ScsiDisk) -> Result<u32, Status> {
        let disk = Some(disk);
        let added = self.client.add_disk(pb::AddDiskRequest { disk }).await?;
        let address = added.into_inner().address.unwrap();
        assert_eq!((address.controller, address.target), (0, 0));
        Ok(address.lun)
    }

    async fn plug_anywhere(&mut self, id: &str, image: &File) -> Result<u32, Status> {
        let disk = self.scsi_disk(id, 0, image).await;
        self.plug(pb::ScsiDisk { lun: None, ..disk }).await
    }

    /// A new overlay over a base of that format.
    async fn overlay(&self, id: &str, lun: u32, files: [&File; 2], format: Format) -> pb::ScsiDisk {
        let mut scsi = self.scsi_disk(id, lun, files[0]).await;
        let base = self.send(files[1]).await;
        if let Some(disk) = &mut scsi.disk {
            disk.format = Format::Qcow2.into();
            disk.base = Some(base);
            disk.base_format = format.into();
            disk.new_overlay = true;
        }
        scsi
    }

    async fn remove(&mut self, id: &str) -> Result<String, Status> {
        let removed = self.client.remove_disk(pb::RemoveDiskRequest { id: id.into() });
        removed.await.map(|answer| answer.into_inner().flush_error)
    }

    /// Returns the size of the disc in bytes.
    async fn insert(&mut self, drive: &str, image: &File) -> Result<u64, Status> {
        let disc = Some(pb::Disk {
            id: drive.into(),
            file: Some(self.send(image).await),
            ..Default::default()
        });
        let inserted = self.client.insert_disc(pb::InsertDiscRequest { disc });
        inserted.await.map(|answer| answer.into_inner().bytes)
    }

    async fn eject(&mut self, drive: &str) -> Result<(), Status> {
        let ejected = self.client.eject_disc(pb::EjectDiscRequest { id: drive.into() });
        ejected.await.map(drop)
    }

    async fn resize(&mut self, id: &str) -> Result<u64, Status> {
        let resized = self.client.resize_disk(pb::ResizeDiskRequest { id: id.into() });
        resized.await.map(|answer| answer.into_inner().bytes)
    }

    /// Name, LUN and MiB of each disk.
    async fn disks(&mut self) -> Vec<(String, Option<u32>, u64)> {
        let info = self.client.info(pb::InfoRequest {}).await.unwrap().into_inner();
        let disks = info.disks.into_iter();
        disks
            .map(|disk| (disk.id, disk.scsi.map(|scsi| scsi.lun), disk.bytes / MIB))
            .collect()
    }

    /// Number of unnamed files that the VMM has open; `None` if this user cannot see them.
    fn open_images(&self) -> Option<usize> {
        let fds = fs::read_dir(format!("/proc/{}/fd", self.pid())).ok()?;
        let targets = fds.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
        Some(
            targets
                .filter(|target| target.to_string_lossy().ends_with("(deleted)"))
                .count(),
        )
    }

    /// Waits until as many images are open as expected: a refused image is closed after the answer.
    async fn closes_all_but(&self, images: Option<usize>) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.open_images() != images {
            assert!(
                Instant::now() < deadline,
                "{:?} images, not {images:?}",
                self.open_images()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn code<T: std::fmt::Debug>(result: Result<T, Status>) -> Code {
    result.unwrap_err().code()
}

fn row(id: &str, lun: impl Into<Option<u32>>, mib: u64) -> (String, Option<u32>, u64) {
    (id.to_owned(), lun.into(), mib)
}

#[tokio::test]
async fn a_disk_is_added_resized_and_removed() {
    let mut rig = Rig::start().await;
    rig.run(&elf(&[print("up"), halt()].concat(), false)).await;
    assert_eq!(rig.read_console(2).await, "up");
    let before = rig.open_images();
    let (data, more) = (image(1), image(2));
    rig.add("data", 3, &data).await.unwrap();
    rig.add("more", 300, &more).await.unwrap();
    assert_eq!(rig.disks().await, [row("data", 3, 1), row("more", 300, 2)]);

    // Adding the same disk again succeeds and closes the second descriptor.
    rig.add("data", 3, &data).await.unwrap();
    assert_eq!(code(rig.add("data", 4, &data).await), Code::AlreadyExists);
    assert_eq!(code(rig.add("third", 3, &data).await), Code::AlreadyExists);
    assert_eq!(rig.open_images(), before.map(|count| count + 2));

    data.set_len(5 * MIB).unwrap();
    assert_eq!(rig.resize("data").await.unwrap(), 5 * MIB);
    assert_eq!(code(rig.resize("third").await), Code::NotFound);
    assert_eq!(rig.disks().await, [row("data", 3, 5), row("more", 300, 2)]);

    assert_eq!(rig.remove("data").await.unwrap(), "");
    assert_eq!(code(rig.remove("data").await), Code::NotFound);
    assert_eq!(rig.disks().await, [row("more", 300, 2)]);
    assert_eq!(rig.open_images(), before.map(|count| count + 1));
    // Refused before its descriptor is taken. The channel closes that later.
    assert_eq!(code(rig.add("third", 16_384, &data).await), Code::InvalidArgument);
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn a_disk_without_a_lun_gets_the_lowest_free_one() {
    let mut rig = Rig::start().await;
    let mut config = rig.config(&elf(&[print("up"), halt()].concat(), false)).await;
    let images = [image(1), image(2), image(3), image(4)];
    config.scsi_disks = vec![rig.scsi_disk("root", 0, &images[0]).await];
    rig.create(config).await.unwrap();
    rig.boot().await.unwrap();
    assert_eq!(rig.read_console(2).await, "up");
    rig.add("third", 2, &images[2]).await.unwrap();
    assert_eq!(rig.plug_anywhere("second", &images[1]).await.unwrap(), 1);
    assert_eq!(rig.plug_anywhere("second", &images[1]).await.unwrap(), 1);
    assert_eq!(rig.plug_anywhere("fourth", &images[3]).await.unwrap(), 3);
    rig.remove("third").await.unwrap();
    assert_eq!(rig.plug_anywhere("third", &images[2]).await.unwrap(), 2);
    let wanted = [
        row("root", 0, 1),
        row("second", 1, 2),
        row("third", 2, 3),
        row("fourth", 3, 4),
    ];
    assert_eq!(rig.disks().await, wanted);
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn disks_of_every_kind_exist_at_start_and_after_a_reset() {
    let mut rig = Rig::start().await;
    let kernel = elf(&[print("boot "), reset(), halt()].concat(), false);
    let mut config = rig.config(&kernel).await;
    let (root, data) = (image(1), image(2));
    config.disks.push(pb::Disk {
        id: "root".into(),
        file: Some(rig.send(&root).await),
        ..Default::default()
    });
    let drive = pb::ScsiDisk {
        disk: Some(pb::Disk {
            id: "drive".into(),
            ..Default::default()
        }),
        lun: Some(1),
        r#type: Type::Cdrom.into(),
        ..Default::default()
    };
    config.scsi_disks = vec![rig.scsi_disk("data", 0, &data).await, drive];
    rig.create(config).await.unwrap();
    rig.boot().await.unwrap();
    let plugged = image(3);
    assert_eq!(code(rig.add("root", 2, &plugged).await), Code::AlreadyExists);
    rig.add("plugged", 2, &plugged).await.unwrap();
    assert_eq!(rig.read_console(25).await, "boot boot boot boot boot ");
    let wanted = [
        row("root", None, 1),
        row("data", 0, 2),
        row("drive", 1, 0),
        row("plugged", 2, 3),
    ];
    assert_eq!(rig.disks().await, wanted);
    root.set_len(4 * MIB).unwrap();
    assert_eq!(rig.resize("root").await.unwrap(), 4 * MIB);
    assert_eq!(code(rig.remove("root").await), Code::NotFound);
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn discs_come_and_go() {
    let mut rig = Rig::start().await;
    let mut config = rig.config(&elf(&[print("up"), halt()].concat(), false)).await;
    let data = image(1);
    let drive = pb::ScsiDisk {
        disk: Some(pb::Disk {
            id: "drive".into(),
            ..Default::default()
        }),
        lun: Some(1),
        r#type: Type::Cdrom.into(),
        ..Default::default()
    };
    config.scsi_disks = vec![rig.scsi_disk("data", 0, &data).await, drive];
    rig.create(config).await.unwrap();
    rig.boot().await.unwrap();
    assert_eq!(rig.read_console(2).await, "up");
    let before = rig.open_images();
    for mib in [2, 3] {
        let disc = image(mib);
        assert_eq!(rig.insert("drive", &disc).await.unwrap(), mib * MIB);
        assert_eq!(rig.disks().await, [row("data", 0, 1), row("drive", 1, mib)]);
        assert_eq!(code(rig.insert("drive", &disc).await), Code::AlreadyExists);
        rig.closes_all_but(before.map(|count| count + 1)).await;
        rig.eject("drive").await.unwrap();
        rig.eject("drive").await.unwrap();
        assert_eq!(rig.disks().await, [row("data", 0, 1), row("drive", 1, 0)]);
        assert_eq!(rig.open_images(), before);
    }
    assert_eq!(code(rig.insert("data", &data).await), Code::InvalidArgument);
    assert_eq!(code(rig.eject("data").await), Code::InvalidArgument);
    assert_eq!(code(rig.insert("no", &data).await), Code::NotFound);
    let short = tempfile::tempfile().unwrap();
    short.set_len(512).unwrap();
    assert_eq!(code(rig.insert("drive", &short).await), Code::InvalidArgument);
    rig.closes_all_but(before).await;
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
}

#[tokio::test]
async fn overlays_work_at_start_and_plugged() {
    let mut rig = Rig::start().await;
    let kernel = elf(&[print("up"), halt()].concat(), false);
    let mut config = rig.config(&kernel).await;
    let base = image(5);
    let overlays = [image(0), image(0), image(0)];
    let root = rig.overlay("root", 0, [&overlays[0], &base], Format::Raw).await;
    config.disks.extend(root.disk);
    rig.create(config).await.unwrap();
    rig.boot().await.unwrap();
    assert_eq!(rig.read_console(2).await, "up");
    let before = rig.open_images();
    let plugged = rig
        .overlay("plugged", 3, [&overlays[1], &base], Format::Raw)
        .await;
    rig.add_disk(plugged).await.unwrap();
    let threads = rig.filtered_threads().await;
    for name in ["husk-vmm", "vcpu0", "scsi", "qcow2", "tokio-rt-worker"] {
        assert!(
            threads.iter().any(|thread| thread.starts_with(name)),
            "{name}: {threads:?}"
        );
    }
    let mut drive = rig.overlay("drive", 4, [&overlays[2], &base], Format::Raw).await;
    drive.set_type(Type::Cdrom);
    assert_eq!(code(rig.add_disk(drive).await), Code::InvalidArgument);
    assert_eq!(rig.disks().await, [row("root", None, 5), row("plugged", 3, 5)]);
    for disk in ["root", "plugged"] {
        let refused = rig.resize(disk).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        let wanted = format!("disk {disk:?}: a qcow2 image is not resized");
        assert_eq!(refused.message(), wanted);
    }

    let no_image = rig.overlay("bad", 5, [&image(0), &base], Format::Qcow2).await;
    let refused = rig.add_disk(no_image).await.unwrap_err();
    let fault = pb::DiskFault::from_status(&refused).unwrap();
    assert_eq!(
        (&fault.disk[..], &fault.reason[..]),
        ("bad", "qcow2: not a qcow2 image")
    );
    assert_eq!(rig.remove("plugged").await.unwrap(), "");
    assert_eq!(rig.open_images(), before);
    rig.client.stop(pb::StopRequest {}).await.unwrap();
    assert_eq!(rig.wait().await.code(), Some(0));
    for overlay in &overlays[..2] {
        let mut head = [0; 4];
        overlay.read_exact_at(&mut head, 0).unwrap();
        assert_eq!(&head, b"QFI\xfb");
    }
}
