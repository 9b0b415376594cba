//! Discs of CD-ROM drives.

use std::fs::File;
use std::path::{Path, PathBuf};

use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::sync_vmi_request::RunState;
use husk_proto::shim::v1::{AddVolumeRequest, Disk, RemoveVolumeRequest, SyncVmiRequest};
use husk_vmi::{DiskSource, VmPlan};
use serde_json::{Value, json};
use tonic::Code;

use super::embedded;
use super::fixture::{Fixture, Vm, eventually, exit_of};
use super::sync::{MIB, changes, image, kill, plan, sync, vmi, volume, wants};
use super::volume_sources::send;

const SAME: RunState = RunState::Unspecified;

/// A VMI with a CD-ROM drive, and with the disc of this data volume in it.
fn with_drive(name: &str, disc: Option<&str>) -> Value {
    let mut vmi = vmi(name, &[]);
    vmi["spec"]["domain"]["devices"]["disks"] = json!([
        {"name": "root", "disk": {"bus": "virtio"}},
        {"name": "cd", "cdrom": {"bus": "scsi"}},
    ]);
    if let Some(disc) = disc {
        let disc = json!({"name": "cd", "dataVolume": {"name": disc, "hotpluggable": true}});
        vmi["spec"]["volumes"].as_array_mut().unwrap().push(disc);
    }
    vmi
}

fn disc(f: &Fixture, name: &str, mib: u64) -> PathBuf {
    let path = f.home().join(name);
    image(&path, mib * MIB);
    path
}

/// The drive as clients see it, and the source of its disc in the kept plan.
fn drive(vm: &mut Vm<'_>) -> (Disk, DiskSource) {
    let disks = vm.info().disks;
    let shown = disks.into_iter().find(|disk| disk.name == "cd").unwrap();
    let plan: VmPlan = serde_json::from_slice(&std::fs::read(vm.dir.plan()).unwrap()).unwrap();
    let kept = plan.disks.into_iter().find(|disk| disk.name == "cd").unwrap();
    (shown, kept.source)
}

pub fn sync_inserts_and_ejects_discs() {
    let f = Fixture::new();
    let (first, second) = (disc(&f, "first.iso", 1), disc(&f, "second.iso", 2));
    let empty = with_drive("demo", None);
    let mut vm = f.start(plan(&f, &empty)).unwrap();
    let go = |vm: &mut Vm<'_>, disc: Option<&str>, paths: &[(&str, &Path)]| {
        sync(&f, vm, wants(&with_drive("demo", disc), SAME, paths)).unwrap()
    };
    let (shown, kept) = drive(&mut vm);
    assert!(shown.is_empty_drive() && kept == DiskSource::Empty, "{shown:?}");
    let done = go(&mut vm, None, &[]);
    assert!(done.complete && done.changes.is_empty(), "{done:?}");

    // A disc without data is pending.
    let done = go(&mut vm, Some("first"), &[]);
    assert!(!done.complete && done.changes.is_empty(), "{done:?}");
    let waits = volume(&done, "cd");
    assert_eq!((waits.phase.as_str(), &waits.disk), ("Pending", &None));
    for wanted in [&[(Kind::VolumeAdded, "cd")][..], &[]] {
        let done = go(&mut vm, Some("first"), &[("cd", &first)]);
        assert_eq!(changes(&done), wanted);
        let ready = volume(&done, "cd");
        assert_eq!((ready.phase.as_str(), done.complete), ("Ready", true));
        let disk = ready.disk.as_ref().unwrap();
        assert_eq!((disk.target.as_str(), disk.bytes), ("sda", Some(MIB)));
        assert!(disk.plugged && disk.read_only && !disk.is_empty_drive());
    }
    assert!(vm.said().contains("inserted cd of 1048576 bytes\n"));
    assert_eq!(drive(&mut vm).1, DiskSource::File(first.clone()));

    // Another claim is another disc.
    let done = go(&mut vm, Some("second"), &[("cd", &second)]);
    let wanted = [(Kind::VolumeRemoved, "cd"), (Kind::VolumeAdded, "cd")];
    assert_eq!(changes(&done), wanted);
    assert!(vm.said().contains("inserted cd of 2097152 bytes\n"));

    let done = go(&mut vm, None, &[]);
    assert_eq!(changes(&done), [(Kind::VolumeRemoved, "cd")]);
    assert!(done.complete && done.volumes.len() == 1, "{done:?}");
    let (shown, kept) = drive(&mut vm);
    assert!(shown.is_empty_drive() && kept == DiskSource::Empty, "{shown:?}");
    // Its image can be written again: it is closed.
    let path = second.to_str().unwrap().to_owned();
    let add = AddVolumeRequest {
        name: "data".into(),
        path,
        ..AddVolumeRequest::default()
    };
    f.wait(vm.client.add_volume(add)).unwrap();
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn locked_tray_delays_the_ejection() {
    let f = Fixture::new();
    let (one, two) = (disc(&f, "one.iso", 1), disc(&f, "two.iso", 1));
    // The guest acts on an eject request after a while.
    let mut vm = f.start(plan(&f, &with_drive("late-unlocks", None))).unwrap();
    let loaded = wants(&with_drive("late-unlocks", Some("one")), SAME, &[("cd", &one)]);
    sync(&f, &mut vm, loaded).unwrap();
    let done = sync(&f, &mut vm, wants(&with_drive("late-unlocks", None), SAME, &[])).unwrap();
    assert_eq!(changes(&done), [(Kind::VolumeRemoved, "cd")]);
    kill(&mut vm);

    // It never does: the disc stays, and no other takes its place.
    let name = "never-unlocks";
    let mut vm = f.start(plan(&f, &with_drive(name, None))).unwrap();
    let loaded = wants(&with_drive(name, Some("one")), SAME, &[("cd", &one)]);
    sync(&f, &mut vm, loaded.clone()).unwrap();
    for (disc, paths) in [(None, &[][..]), (Some("two"), &[("cd", two.as_path())][..])] {
        let done = sync(&f, &mut vm, wants(&with_drive(name, disc), SAME, paths)).unwrap();
        assert!(done.changes.is_empty() && !done.complete, "{done:?}");
        let stays = volume(&done, "cd");
        let wanted = ("Detaching", "VolumeDetachFailed", "the guest has locked the tray");
        let said = (
            stays.phase.as_str(),
            stays.reason.as_str(),
            stays.message.as_str(),
        );
        assert_eq!(said, wanted);
        assert!(!stays.disk.as_ref().unwrap().removing);
    }
    assert_eq!(drive(&mut vm).1, DiskSource::File(one));
    let done = sync(&f, &mut vm, loaded).unwrap();
    assert!(done.complete && done.changes.is_empty(), "{done:?}");
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn disc_is_added_and_removed_by_name() {
    let f = Fixture::new();
    let hotplug = f.home().join("hotplug-disks");
    std::fs::create_dir(&hotplug).unwrap();
    let (mut vm, mut host) = embedded::start(&f, &plan(&f, &with_drive("demo", None)), &hotplug);
    let remove = |vm: &mut Vm<'_>| {
        let request = RemoveVolumeRequest { name: "cd".into() };
        f.wait(vm.client.remove_volume(request))
    };
    // An empty drive has no volume.
    let refused = remove(&mut vm).unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    let inside = hotplug.join("cd.img");
    image(&inside, MIB);
    let add = |path: &Path| AddVolumeRequest {
        name: "cd".into(),
        path: path.to_str().unwrap().into(),
        ..AddVolumeRequest::default()
    };
    for _ in 0..2 {
        let added = f.wait(vm.client.add_volume(add(&inside))).unwrap();
        assert_eq!(added.into_inner().lun, 0);
    }
    let other = hotplug.join("other.img");
    image(&other, MIB);
    let taken = f.wait(vm.client.add_volume(add(&other))).unwrap_err();
    assert_eq!(taken.code(), Code::AlreadyExists, "{taken}");
    remove(&mut vm).unwrap();
    assert!(drive(&mut vm).0.is_empty_drive());
    let outside = f.wait(vm.client.add_volume(add(&disc(&f, "outside.iso", 1))));
    assert_eq!(outside.unwrap_err().code(), Code::PermissionDenied);

    // A descriptor that can only be read is enough for a disc.
    let file = File::open(&inside).unwrap();
    std::fs::remove_file(&inside).unwrap();
    let request = SyncVmiRequest {
        fds: [("cd".to_owned(), send(&f, &vm, &file).into())].into(),
        ..wants(&with_drive("demo", Some("cd")), SAME, &[])
    };
    let done = sync(&f, &mut vm, request).unwrap();
    assert_eq!(changes(&done), [(Kind::VolumeAdded, "cd")]);
    assert!(matches!(drive(&mut vm).1, DiskSource::Descriptor(_)));
    kill(&mut vm);
    assert!(exit_of(&mut host).success());
    f.is_clean(&vm.pids());
}

pub fn disc_that_was_inserted_too_late_is_ejected_before_the_next() {
    let f = Fixture::new();
    let name = "adds-late";
    let mut vm = f.start(plan(&f, &with_drive(name, None))).unwrap();
    let add = AddVolumeRequest {
        name: "cd".into(),
        path: disc(&f, "one.iso", 1).to_str().unwrap().into(),
        ..AddVolumeRequest::default()
    };
    let late = f.wait(vm.client.add_volume(add.clone())).unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    let early = f.wait(vm.client.add_volume(add.clone())).unwrap_err();
    assert_eq!(early.message(), "volume \"cd\" is being removed");
    eventually("it is inserted", || {
        f.wait(vm.client.add_volume(add.clone())).is_ok()
    });
    assert_eq!(drive(&mut vm).0.bytes, Some(MIB));
    kill(&mut vm);
    f.is_clean(&vm.pids());
}
