//! Data of hotpluggable volumes: the pod's hotplug directory, and descriptors.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;

use husk_proto::fds::{FdSender, Token};
use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::sync_vmi_request::RunState;
use husk_proto::shim::v1::{AddVolumeRequest, SyncVmiResponse};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tonic::{Code, Status};

use super::embedded;
use super::fixture::{Fixture, Vm, exit_of};
use super::sync::{MIB, changes, image, kill, plan, sync, vmi, volume, wants};

fn add(f: &Fixture, vm: &mut Vm<'_>, name: &str, path: &Path) -> Result<u32, (Code, String)> {
    let request = AddVolumeRequest {
        name: name.into(),
        path: path.to_str().unwrap().into(),
        ..AddVolumeRequest::default()
    };
    told(
        f.wait(vm.client.add_volume(request))
            .map(|added| added.into_inner().lun),
    )
}

fn told<T>(answer: Result<T, Status>) -> Result<T, (Code, String)> {
    answer.map_err(|status| (status.code(), status.message().to_owned()))
}

pub fn pod_volumes_come_from_the_hotplug_directory() {
    let f = Fixture::new();
    let hotplug = f.home().join("hotplug-disks");
    std::fs::create_dir(&hotplug).unwrap();
    let outside = f.home().join("outside.img");
    image(&outside, MIB);
    symlink(&outside, hotplug.join("link.img")).unwrap();
    let plain = vmi("demo", &[]);
    let (mut vm, mut host) = embedded::start(&f, &plan(&f, &plain), &hotplug);

    for path in [
        &outside,
        Path::new("/etc/shadow"),
        &hotplug.join("../outside.img"),
        &hotplug,
    ] {
        let (code, text) = add(&f, &mut vm, "data", path).unwrap_err();
        assert_eq!(code, Code::PermissionDenied, "{text}");
        assert!(
            text.contains("is not in a mount, the devices or the hotplug directory of this pod"),
            "{text}"
        );
    }
    assert_eq!(
        add(&f, &mut vm, "data", &hotplug.join("link.img")).unwrap_err().0,
        Code::FailedPrecondition
    );
    let view = Path::new("/var/run/kubevirt/hotplug-disks");
    let (code, text) = add(&f, &mut vm, "data", &view.join("data.img")).unwrap_err();
    assert_eq!(code, Code::FailedPrecondition);
    assert!(text.contains("No such file"), "{text}");

    let more = vmi("demo", &["data", "link", "folder"]);
    let state = RunState::Unspecified;
    std::fs::create_dir(hotplug.join("folder")).unwrap();
    let done = sync(&f, &mut vm, wants(&more, state, &[])).unwrap();
    let phases = |done: &SyncVmiResponse| -> Vec<String> {
        let volumes = done.volumes.iter();
        volumes
            .map(|volume| format!("{} {}", volume.name, volume.phase))
            .collect()
    };
    assert_eq!(
        phases(&done),
        ["data Pending", "folder Pending", "link MountedToPod", "root "]
    );
    assert_eq!(volume(&done, "link").reason, "VolumeAttachFailed");
    image(&hotplug.join("data.img"), MIB);
    image(&hotplug.join("folder/disk.img"), 2 * MIB);
    let done = sync(&f, &mut vm, wants(&more, state, &[])).unwrap();
    assert_eq!(
        changes(&done),
        [(Kind::VolumeAdded, "data"), (Kind::VolumeAdded, "folder")]
    );
    // Both paths name the volume that is present.
    assert_eq!(
        add(&f, &mut vm, "data", &hotplug.join("data.img")).unwrap_err().0,
        Code::AlreadyExists
    );
    let outside = sync(&f, &mut vm, wants(&more, state, &[("link", &outside)]));
    assert_eq!(outside.unwrap_err().code(), Code::PermissionDenied);
    let done = sync(&f, &mut vm, wants(&plain, state, &[])).unwrap();
    assert_eq!(done.changes.len(), 2);
    assert_eq!(add(&f, &mut vm, "data", &view.join("data.img")).unwrap(), 0);
    assert_eq!(add(&f, &mut vm, "data", &hotplug.join("data.img")).unwrap(), 0);
    kill(&mut vm);
    assert!(exit_of(&mut host).success());
    f.is_clean(&vm.pids());
}

/// Sends a descriptor to the VM's fds.sock over a new connection.
pub fn send(f: &Fixture, vm: &Vm<'_>, file: &File) -> Token {
    f.wait(async {
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        connect(&socket, &SocketAddrUnix::new(vm.dir.descriptors()).unwrap()).unwrap();
        let sender = FdSender::new(socket).unwrap();
        sender.send_one(file.as_fd()).await.unwrap()
    })
}

pub fn volume_is_passed_as_a_descriptor() {
    let f = Fixture::new();
    let hotplug = f.home().join("hotplug-disks");
    std::fs::create_dir(&hotplug).unwrap();
    let (mut vm, mut host) = embedded::start(&f, &plan(&f, &vmi("demo", &[])), &hotplug);
    let mut handed = |name: &str, file: &File, path: &str| {
        let token = send(&f, &vm, file);
        let request = AddVolumeRequest {
            name: name.into(),
            fd: Some(token.into()),
            path: path.into(),
            ..AddVolumeRequest::default()
        };
        told(
            f.wait(vm.client.add_volume(request))
                .map(|added| added.into_inner().lun),
        )
    };
    let path = f.home().join("nameless.img");
    image(&path, MIB);
    let open = || File::options().read(true).write(true).open(&path).unwrap();
    let (first, again, only_read) = (open(), open(), File::open(&path).unwrap());
    std::fs::remove_file(&path).unwrap();
    let (code, text) = handed("data", &only_read, "").unwrap_err();
    assert_eq!(code, Code::InvalidArgument);
    assert!(text.contains("cannot be written"), "{text}");
    assert_eq!(handed("data", &first, "/x").unwrap_err().0, Code::InvalidArgument);
    assert_eq!(handed("data", &first, "").unwrap(), 0);
    // The same file is the same volume, even through another descriptor.
    assert_eq!(handed("data", &again, "").unwrap(), 0);
    assert_eq!(handed("other", &first, "").unwrap_err().0, Code::AlreadyExists);
    let other = File::from(OwnedFd::from(tempfile::tempfile().unwrap()));
    other.set_len(MIB).unwrap();
    assert_eq!(handed("data", &other, "").unwrap_err().0, Code::AlreadyExists);
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    let (code, text) = handed("null", &null, "").unwrap_err();
    assert_eq!(code, Code::InvalidArgument);
    assert!(text.contains("is a character device"), "{text}");
    assert_eq!(handed("other", &other, "").unwrap(), 1);
    for fd in [Token::random().into(), husk_proto::vmm::v1::Fd { token: vec![1] }] {
        let request = AddVolumeRequest {
            name: "none".into(),
            fd: Some(fd),
            ..AddVolumeRequest::default()
        };
        f.wait(vm.client.add_volume(request)).unwrap_err();
    }
    // Such a volume is unplugged with the next VMI that does not have it. Others come with the VMI.
    let mut request = wants(
        &vmi("demo", &["data", "third", "late"]),
        RunState::Unspecified,
        &[],
    );
    let third = File::from(OwnedFd::from(tempfile::tempfile().unwrap()));
    third.set_len(MIB).unwrap();
    request.fds = [
        ("data".to_owned(), send(&f, &vm, &first).into()),
        ("third".to_owned(), send(&f, &vm, &third).into()),
        ("late".to_owned(), Token::random().into()),
    ]
    .into();
    let done = sync(&f, &mut vm, request.clone()).unwrap();
    assert_eq!(
        changes(&done),
        [(Kind::VolumeRemoved, "other"), (Kind::VolumeAdded, "third")]
    );
    assert_eq!(volume(&done, "data").phase, "Ready");
    assert_eq!(volume(&done, "third").phase, "Ready");
    // The descriptor of one volume has not arrived; the others do not wait for it.
    let late = volume(&done, "late");
    assert_eq!(
        (late.phase.as_str(), late.reason.as_str()),
        ("MountedToPod", "VolumeAttachFailed")
    );
    assert!(!done.complete);
    request.paths = [("third".to_owned(), "/x".to_owned())].into();
    let refused = sync(&f, &mut vm, request.clone()).unwrap_err();
    assert!(
        refused.message().contains("by its path and by a descriptor"),
        "{refused:?}"
    );
    request.paths.clear();
    request.fds = [("none".to_owned(), Token::random().into())].into();
    let refused = sync(&f, &mut vm, request).unwrap_err();
    assert!(refused.message().contains("no volume \"none\""), "{refused:?}");
    kill(&mut vm);
    assert!(exit_of(&mut host).success());
    f.is_clean(&vm.pids());
}
