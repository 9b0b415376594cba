//! Snapshots of VMs with disks that other files than the snapshot's hold: left outside, or copied in full.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use husk_monitor::snapshot;
use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::sync_vmi_request::RunState;
use husk_proto::shim::v1::{ResumeRequest, ShutdownRequest, SnapshotDone, SnapshotRequest, SyncVmiResponse};
use husk_vmi::{CacheMode, DiskPlan, DiskSource};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde_json::json;
use tonic::{Code, Status};

use super::fixture::{Fixture, Vm, disk, eventually, plan};
use super::snapshots::{MIB, begin, data, dir, finish, kill, paused, refused, restore, save, vm};
use super::sync;

pub fn snapshot_with_a_disk_outside_is_for_a_vm_that_stays() {
    let f = Fixture::new();
    let mut plan = vm(&f, "demo");
    plan.disks.push(data(&f));
    let mut source = f.start(plan).unwrap();
    let directory = dir(&f, "one");
    let error = save(&f, &source, &directory, true).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    let begin = format!(
        "volume \"data\": {} is not in a snapshot, because it is `shareable`",
        f.home().join("data.img").display()
    );
    assert!(error.message().starts_with(&begin), "{}", error.message());
    assert!(
        error.message().contains("leave out --resume"),
        "{}",
        error.message()
    );
    assert!(!directory.exists() && !source.status().paused);

    let done = save(&f, &source, &directory, false).unwrap();
    assert!(done.paused);
    assert_eq!(done.outside, ["data"]);
    // Another one that was removed does not keep the VM from going on.
    let gone = dir(&f, "gone");
    save(&f, &source, &gone, false).unwrap();
    fs::remove_dir_all(&gone).unwrap();
    // It is found where it is now.
    let moved = dir(&f, "moved");
    fs::rename(&directory, &moved).unwrap();
    f.wait(source.client.resume(ResumeRequest {})).unwrap();
    paused(&mut source, false);
    let text = refused(restore(&f, &moved, "clone"));
    let wanted = format!("{}: the VM was resumed after this snapshot", moved.display());
    assert!(text.starts_with(&wanted) && text.contains("\"data\""), "{text}");

    // The power button lets a paused VM go on too.
    let second = dir(&f, "second");
    save(&f, &source, &second, false).unwrap();
    source.ends(async |mut client| {
        client
            .shutdown(ShutdownRequest { grace_seconds: None })
            .await
            .unwrap();
    });
    let text = refused(restore(&f, &second, "demo"));
    assert!(text.contains("the VM was resumed after this snapshot"), "{text}");
    f.is_clean(&source.pids());
}

pub fn snapshot_with_a_disk_outside_is_restored_once() {
    let f = Fixture::new();
    let mut plan = vm(&f, "demo");
    plan.disks.push(data(&f));
    let mut source = f.start(plan).unwrap();
    let (first, second) = (dir(&f, "first"), dir(&f, "second"));
    save(&f, &source, &first, false).unwrap();
    save(&f, &source, &second, false).unwrap();

    // The disk is shareable, so it is not in use.
    let mut restored = restore(&f, &first, "demo2").unwrap();
    let text = refused(restore(&f, &first, "demo3"));
    let wanted = format!("{} was restored already at 2", first.display());
    assert!(text.starts_with(&wanted) && text.contains("\"data\""), "{text}");
    let error = f.wait(source.client.resume(ResumeRequest {})).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    let wanted = format!(
        "the snapshot {} was restored, and volume \"data\"",
        first.display()
    );
    assert!(error.message().starts_with(&wanted), "{}", error.message());
    assert!(source.status().paused);
    kill(&mut source);
    kill(&mut restored);
    assert_eq!(refused(restore(&f, &first, "demo")), text);

    // The other one has the disk as it was before.
    let image = File::options()
        .write(true)
        .open(f.home().join("data.img"))
        .unwrap();
    image.write_all_at(b"changed", 0).unwrap();
    let text = refused(restore(&f, &second, "demo"));
    let wanted = format!(
        "volume \"data\": {} has changed since the snapshot, which needs it as it was",
        f.home().join("data.img").display()
    );
    assert_eq!(text, wanted);
    f.is_clean(&[source.pids(), restored.pids()].concat());
}

pub fn restore_without_a_guest_that_ran_does_not_count() {
    let f = Fixture::new();
    let mut plan = vm(&f, "demo");
    plan.disks.push(data(&f));
    let mut source = f.start(plan).unwrap();
    let (first, second) = (dir(&f, "first"), dir(&f, "second"));
    save(&f, &source, &first, false).unwrap();
    save(&f, &source, &second, false).unwrap();
    kill(&mut source);
    for directory in [&first, &first, &second] {
        let text = refused(restore(&f, directory, "no-kernel"));
        assert_eq!(text, "disk data: no partition table");
    }
    for (directory, name) in [(&first, "dies-booting"), (&second, "half-boots")] {
        let text = refused(restore(&f, directory, name));
        assert!(!text.contains("restored already"), "{text}");
        let text = refused(restore(&f, directory, "demo"));
        let wanted = format!("{} was restored already at 2", directory.display());
        assert!(text.starts_with(&wanted), "{text}");
    }
    f.is_clean(&source.pids());
}

/// A disk with an image of 1 MiB in a directory that shares no extents with snapshots.
fn claim(home: &Path) -> DiskPlan {
    let path = home.join("claim.img");
    let file = File::create(&path).unwrap();
    file.write_all_at(&vec![7; 1 << 20], 0).unwrap();
    DiskPlan {
        cache: CacheMode::WriteBack,
        ..disk("claim", DiskSource::File(path))
    }
}

fn save_with_disks(f: &Fixture, vm: &Vm<'_>, directory: &Path) -> Result<SnapshotDone, Status> {
    let request = SnapshotRequest {
        directory: directory.to_str().unwrap().into(),
        resume: true,
        checksums: true,
        copy_disks: true,
        live: false,
    };
    let mut client = vm.client.clone();
    let steps = f.wait(client.snapshot(request));
    finish(f, &mut steps?.into_inner())
}

pub fn disk_is_copied_in_full_on_request() {
    let f = Fixture::new();
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut plan = vm(&f, "demo");
    plan.disks.push(claim(other.path()));
    let image = other.path().join("claim.img");
    let mut source = f.start(plan).unwrap();
    let directory = dir(&f, "one");
    let error = save(&f, &source, &directory, true).unwrap_err();
    let begin = format!(
        "volume \"claim\": {} cannot be copied in an instant",
        image.display()
    );
    assert!(error.message().starts_with(&begin), "{}", error.message());
    assert!(error.message().contains("--copy-disks"), "{}", error.message());

    let done = save_with_disks(&f, &source, &directory).unwrap();
    assert!(!done.paused && done.outside.is_empty(), "{done:?}");
    paused(&mut source, false);
    let copy = fs::read(directory.join("disk-claim.img")).unwrap();
    assert_eq!(copy.len() as u64, MIB);
    // What the guest wrote last is there.
    assert_eq!(&copy[..8], b"flushed\x07");
    snapshot::verify(&directory, &AtomicBool::new(false), &|_, _, _| {}).unwrap();

    // The image is in use, changes, and is not needed. Clones have copies, which snapshots of them have too.
    let file = File::options().write(true).open(&image).unwrap();
    file.write_all_at(b"changed", 0).unwrap();
    let mut clones = ["demo2", "demo3"].map(|name| restore(&f, &directory, name).unwrap());
    let again = dir(&f, "again");
    assert_eq!(save(&f, &clones[0], &again, true).unwrap().outside, [""; 0]);
    assert_eq!(fs::read(again.join("disk-claim.img")).unwrap(), copy);
    for vm in &mut clones {
        kill(vm);
    }
    assert_eq!(fs::read(directory.join("disk-claim.img")).unwrap(), copy);
    assert_eq!(&fs::read(&image).unwrap()[..8], b"changed\x07");
    kill(&mut source);
    fs::remove_file(&image).unwrap();
    let mut last = restore(&f, &directory, "demo").unwrap();
    kill(&mut last);
    f.is_clean(&[source.pids(), last.pids()].concat());
}

pub fn claim_grows_and_volume_is_plugged_after_the_snapshot() {
    let f = Fixture::new();
    let vmi = sync::vmi("saves-slowly", &[]);
    let mut larger = sync::vmi("saves-slowly", &["more"]);
    larger["status"] = json!({"volumeStatus": [sync::claim("root", "5Mi")]});
    let more = f.home().join("more.img");
    sync::image(&more, MIB);
    let request = sync::wants(&larger, RunState::Unspecified, &[("more", &more)]);
    let mut vm = f.start(sync::plan(&f, &vmi)).unwrap();
    let mut steps = begin(&f, &vm, &dir(&f, "one"), false).unwrap();
    f.wait(steps.message()).unwrap().unwrap();
    let done = sync::sync(&f, &mut vm, request.clone()).unwrap();
    assert!(done.changes.is_empty() && !done.complete, "{done:?}");
    let state = |done: &SyncVmiResponse| {
        let status = sync::volume(done, "more");
        (status.phase.clone(), status.reason.clone())
    };
    assert_eq!(state(&done), ("MountedToPod".into(), "VolumeInUse".into()));
    let bytes = || fs::metadata(f.home().join("root.img")).unwrap().len();
    assert_eq!(bytes(), MIB);
    drop(steps);
    eventually("the image grows", || {
        // The client's connection works only during a call.
        vm.info();
        bytes() == 5 * MIB
    });
    eventually("it is complete", || {
        let done = sync::sync(&f, &mut vm, request.clone()).unwrap();
        done.complete && state(&done).0 == "Ready"
    });
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn claim_outside_a_snapshot_grows_when_the_vm_goes_on() {
    let f = Fixture::new();
    let mut vmi = sync::vmi("demo", &[]);
    // So it is outside on every file system.
    vmi["spec"]["domain"]["devices"]["disks"][0]["shareable"] = json!(true);
    let larger = |size: &str, state: RunState| {
        let mut larger = vmi.clone();
        larger["status"] = json!({"volumeStatus": [sync::claim("root", size)]});
        sync::wants(&larger, state, &[])
    };
    let mut source = f.start(sync::plan(&f, &vmi)).unwrap();
    let bytes = || fs::metadata(f.home().join("root.img")).unwrap().len();
    assert_eq!(
        save(&f, &source, &dir(&f, "one"), false).unwrap().outside,
        ["root"]
    );
    let waits = larger("3Mi", RunState::Unspecified);
    assert!(!sync::sync(&f, &mut source, waits).unwrap().complete);
    assert_eq!(bytes(), MIB);
    let done = sync::sync(&f, &mut source, larger("3Mi", RunState::Running)).unwrap();
    assert_eq!(
        sync::changes(&done),
        [(Kind::Resumed, ""), (Kind::DiskGrew, "root")]
    );
    assert!(done.complete && bytes() == 3 * MIB, "{done:?}");

    let two = dir(&f, "two");
    save(&f, &source, &two, false).unwrap();
    let waits = larger("5Mi", RunState::Unspecified);
    assert!(!sync::sync(&f, &mut source, waits).unwrap().complete);
    let mut restored = restore(&f, &two, "demo2").unwrap();
    kill(&mut source);
    kill(&mut restored);
    f.is_clean(&[source.pids(), restored.pids()].concat());
}

pub fn disk_that_does_not_fit_leaves_nothing() {
    let work = || {
        // SAFETY: without FILES, the descriptors stay shared.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
        mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
        let f = Fixture::new();
        let (small, other) = (f.home().join("small"), tempfile::tempdir_in("/dev/shm").unwrap());
        fs::create_dir(&small).unwrap();
        mount("none", &small, "tmpfs", MountFlags::empty(), Some(c"size=256k")).unwrap();
        let mut plan = plan("demo");
        plan.disks.push(claim(other.path()));
        let mut source = f.start(plan).unwrap();
        let directory = small.join("one");
        let error = save_with_disks(&f, &source, &directory).unwrap_err();
        assert_eq!(
            error.message(),
            "volume \"claim\": its image does not fit into the snapshot: No space left on device (os error 28): make \
             room, or name a directory on another file system"
        );
        paused(&mut source, false);
        assert!(!directory.exists());
        save_with_disks(&f, &source, &dir(&f, "two")).unwrap();
        kill(&mut source);
        f.is_clean(&source.pids());
    };
    std::thread::spawn(work).join().unwrap();
}
