//! Snapshots, and VMs that go on from them.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use husk_monitor::launch::{LaunchError, MonitorConfig};
use husk_monitor::snapshot;
use husk_proto::shim::v1::snapshot_progress::Progress;
use husk_proto::shim::v1::{
    AddVolumeRequest, KillRequest, PauseRequest, RemoveVolumeRequest, ResumeRequest, SnapshotDone,
    SnapshotProgress, SnapshotRequest,
};
use husk_vmi::{CacheMode, DeviceType, DiskPlan, DiskSource, ScsiController, SeedData, SeedLayout, VmPlan};
use tonic::{Code, Status, Streaming};

use super::fixture::{Fixture, Vm, alive, disk, eventually, plan};
use super::lives::shut_down;

pub const MIB: u64 = 1 << 20;

fn image(f: &Fixture, name: &str) -> PathBuf {
    let path = f.home().join(name);
    let file = File::create(&path).unwrap();
    file.set_len(MIB).unwrap();
    file.write_all_at(name.as_bytes(), 512).unwrap();
    path
}

/// A writable disk whose image is the user's.
pub fn data(f: &Fixture) -> DiskPlan {
    DiskPlan {
        // Nobody else writes to it, but a copy would not have what other VMs write.
        shareable: true,
        ..disk("data", DiskSource::File(image(f, "data.img")))
    }
}

/// A VM with disks of all kinds that are included.
pub fn vm(f: &Fixture, name: &str) -> VmPlan {
    let mut plan = plan(name);
    plan.scsi = Some(ScsiController { queues: 1 });
    plan.disks.push(DiskPlan {
        overlay: true,
        ..disk("root", DiskSource::File(image(f, "root.img")))
    });
    plan.disks.push(DiskPlan {
        cache: CacheMode::WriteBack,
        ..disk("scratch", DiskSource::EmptyDisk { capacity_bytes: MIB })
    });
    plan.disks.push(DiskPlan {
        read_only: true,
        ..disk("fixed", DiskSource::File(image(f, "fixed.img")))
    });
    plan.disks.push(DiskPlan {
        read_only: true,
        device: DeviceType::Disk,
        ..disk(
            "seed",
            DiskSource::CloudInit {
                layout: SeedLayout::NoCloud,
                meta_data: "{}".into(),
                public_keys: Vec::new(),
                user_data: SeedData::Inline(b"secret".to_vec()),
                network_data: None,
            },
        )
    });
    plan
}

pub fn dir(f: &Fixture, name: &str) -> PathBuf {
    let snapshots = f.home().join("snapshots");
    fs::create_dir_all(&snapshots).unwrap();
    snapshots.join(name)
}

pub fn begin(
    f: &Fixture,
    vm: &Vm<'_>,
    directory: &Path,
    resume: bool,
) -> Result<Streaming<SnapshotProgress>, Status> {
    let request = SnapshotRequest {
        directory: directory.to_str().unwrap().into(),
        resume,
        ..SnapshotRequest::default()
    };
    let mut client = vm.client.clone();
    Ok(f.wait(client.snapshot(request))?.into_inner())
}

pub fn finish(f: &Fixture, steps: &mut Streaming<SnapshotProgress>) -> Result<SnapshotDone, Status> {
    f.wait(async {
        let mut names = Vec::new();
        while let Some(step) = steps.message().await? {
            match step.progress.unwrap() {
                Progress::Done(done) => {
                    assert!(names.contains(&"memory".to_owned()), "{names:?}");
                    return Ok(done);
                }
                Progress::Step(step) => names.push(step.name),
            }
        }
        Err(Status::unavailable("the stream ended"))
    })
}

pub fn save(f: &Fixture, vm: &Vm<'_>, directory: &Path, resume: bool) -> Result<SnapshotDone, Status> {
    finish(f, &mut begin(f, vm, directory, resume)?)
}

pub fn config(f: &Fixture, directory: &Path, name: &str) -> MonitorConfig {
    let read = snapshot::read(directory).unwrap();
    let plugged_disks = read.plugged_disks();
    let plan = VmPlan {
        name: name.into(),
        ..read.plan
    };
    MonitorConfig {
        snapshot: Some(directory.into()),
        vmi: read.vmi,
        plugged_disks,
        ..f.config(plan)
    }
}

pub fn restore<'a>(f: &'a Fixture, directory: &Path, name: &str) -> Result<Vm<'a>, String> {
    match f.start_config(&config(f, directory, name)) {
        Ok(vm) => Ok(vm),
        Err(LaunchError::Failed { message, .. }) => Err(message),
        Err(other) => panic!("{other:?}"),
    }
}

pub fn refused(result: Result<Vm<'_>, String>) -> String {
    result.map(|vm| vm.monitor).unwrap_err()
}

pub fn kill(vm: &mut Vm<'_>) {
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

pub fn paused(vm: &mut Vm<'_>, wanted: bool) {
    eventually("the VM is paused or not", || vm.status().paused == wanted);
}

pub fn vms_go_on_from_a_snapshot() {
    let f = Fixture::new();
    let mut source = f.start(vm(&f, "demo")).unwrap();
    let directory = dir(&f, "one");
    let done = save(&f, &source, &directory, false).unwrap();
    assert!(done.paused && done.outside.is_empty(), "{done:?}");
    paused(&mut source, true);
    let held = [
        "disk-root.qcow2",
        "disk-scratch.img",
        "disk-seed.img",
        "memory",
        "snapshot.json",
        "state.json",
    ];
    assert_eq!(names(&directory), held);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&directory), 0o700);
    for name in held {
        assert_eq!(mode(&directory.join(name)), 0o600, "{name}");
    }
    // What the VMM wrote last is there.
    for name in ["disk-root.qcow2", "disk-scratch.img"] {
        let content = fs::read(directory.join(name)).unwrap();
        assert_eq!(&content[..7], b"flushed", "{name}");
    }
    let iso = fs::read(directory.join("disk-seed.img")).unwrap();
    assert!(iso.windows(6).any(|part| part == b"secret"));

    // The source is not needed, and not in the way.
    let before = names(&directory);
    let mut clones = ["demo2", "demo3"].map(|name| restore(&f, &directory, name).unwrap());
    for clone in &mut clones {
        eventually("it has the state", || {
            clone
                .said()
                .contains("goes on from \"state of default/demo\" and \"memory\"\n")
        });
        assert!(!clone.status().paused);
        let plan: VmPlan = serde_json::from_slice(&fs::read(clone.dir.plan()).unwrap()).unwrap();
        assert_eq!(plan.uuid, snapshot::read(&directory).unwrap().plan.uuid);
    }
    // A snapshot of a clone has its disks too.
    let again = dir(&f, "again");
    save(&f, &clones[0], &again, true).unwrap();
    assert_eq!(names(&again), held);
    assert_eq!(names(&directory), before);
    f.wait(source.client.resume(ResumeRequest {})).unwrap();
    let [one, two] = &mut clones;
    for vm in [&mut source, one, two] {
        kill(vm);
    }
    let mut last = restore(&f, &again, "demo").unwrap();
    kill(&mut last);
    f.is_clean(&[source.pids(), last.pids()].concat());
}

fn save_live(f: &Fixture, vm: &Vm<'_>, directory: &Path) -> Result<SnapshotDone, Status> {
    let request = SnapshotRequest {
        directory: directory.to_str().unwrap().into(),
        resume: true,
        live: true,
        ..SnapshotRequest::default()
    };
    let mut client = vm.client.clone();
    let steps = f.wait(client.snapshot(request));
    finish(f, &mut steps?.into_inner())
}

pub fn memory_is_saved_before_the_pause_on_request() {
    let f = Fixture::new();
    let mut source = f.start(vm(&f, "demo")).unwrap();
    let directory = dir(&f, "one");
    assert!(!save_live(&f, &source, &directory).unwrap().paused);
    eventually("memory is copied", || source.said().contains("copies memory\n"));
    let mut clone = restore(&f, &directory, "demo2").unwrap();
    eventually("it has the state", || {
        clone
            .said()
            .contains(r#"goes on from "state of default/demo" and "memory""#)
    });
    kill(&mut source);
    kill(&mut clone);
    f.is_clean(&[source.pids(), clone.pids()].concat());
}

pub fn guest_that_reboots_in_a_live_save_goes_on() {
    let f = Fixture::new();
    let mut vm = f.start(vm(&f, "reboots")).unwrap();
    let directory = dir(&f, "one");
    let refused = save_live(&f, &vm, &directory).unwrap_err();
    assert_eq!(refused.message(), "the machine was reset");
    assert!(!directory.exists());
    paused(&mut vm, false);
    save(&f, &vm, &directory, true).unwrap();
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn checksums_are_written_on_request() {
    let f = Fixture::new();
    let mut vm = f.start(vm(&f, "demo")).unwrap();
    let directory = dir(&f, "one");
    let request = SnapshotRequest {
        directory: directory.to_str().unwrap().into(),
        resume: true,
        checksums: true,
        ..SnapshotRequest::default()
    };
    let mut client = vm.client.clone();
    let mut steps = f.wait(client.snapshot(request)).unwrap().into_inner();
    assert!(!finish(&f, &mut steps).unwrap().paused);
    let sums = directory.join("checksums");
    assert_eq!(fs::metadata(&sums).unwrap().permissions().mode() & 0o777, 0o600);
    let checked = Mutex::new(Vec::new());
    let progress = |file: &str, done, total| {
        if done == total {
            checked.lock().unwrap().push(file.to_owned());
        }
    };
    let verify = || snapshot::verify(&directory, &AtomicBool::new(false), &progress);
    verify().unwrap();
    let mut checked = checked.into_inner().unwrap();
    checked.dedup();
    let all = [
        "state.json",
        "memory",
        "disk-root.qcow2",
        "disk-scratch.img",
        "disk-seed.img",
    ];
    assert_eq!(checked, all);
    let seed = directory.join("disk-seed.img");
    let image = File::options().write(true).open(&seed).unwrap();
    image.write_all_at(&[7], 40_000).unwrap();
    let text = snapshot::verify(&directory, &AtomicBool::new(false), &|_, _, _| {}).unwrap_err();
    let wanted = format!(
        "{}: the MiB at byte 0 is not what was written: the snapshot is damaged",
        seed.display()
    );
    assert_eq!(text.to_string(), wanted);
    // Without being asked, nobody compares.
    let mut clone = restore(&f, &directory, "clone").unwrap();
    kill(&mut clone);
    kill(&mut vm);
    f.is_clean(&[vm.pids(), clone.pids()].concat());
}

pub fn vm_runs_on_unless_it_was_paused() {
    let f = Fixture::new();
    let mut vm = f.start(vm(&f, "demo")).unwrap();
    // An empty directory is used.
    let directory = dir(&f, "one");
    fs::create_dir(&directory).unwrap();
    let done = save(&f, &vm, &directory, true).unwrap();
    assert!(!done.paused);
    paused(&mut vm, false);
    assert!(directory.join("snapshot.json").exists());
    let error = save(&f, &vm, &directory, true).unwrap_err();
    let text = format!(
        "{} is not empty: name a directory that does not exist",
        directory.display()
    );
    assert_eq!(error.message(), text);
    assert!(directory.join("snapshot.json").exists());

    f.wait(vm.client.pause(PauseRequest {})).unwrap();
    let done = save(&f, &vm, &dir(&f, "two"), true).unwrap();
    assert!(done.paused && vm.status().paused);
    f.wait(vm.client.resume(ResumeRequest {})).unwrap();
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn resume_waits_for_a_snapshot_that_can_be_told() {
    let f = Fixture::new();
    let mut plan = vm(&f, "demo");
    plan.disks.push(data(&f));
    let mut source = f.start(plan).unwrap();
    let directory = dir(&f, "one");
    save(&f, &source, &directory, false).unwrap();
    let description = directory.join("snapshot.json");
    let kept = fs::read(&description).unwrap();
    fs::write(&description, "{").unwrap();
    let error = f.wait(source.client.resume(ResumeRequest {})).unwrap_err();
    let wanted = format!(
        "cannot resume: the VM's once-only snapshot cannot be marked as unusable: {}: ",
        description.display()
    );
    assert!(error.message().starts_with(&wanted), "{}", error.message());
    let wanted = format!(": remove {}", directory.display());
    assert!(error.message().ends_with(&wanted), "{}", error.message());
    assert!(source.status().paused);
    fs::write(&description, kept).unwrap();
    f.wait(source.client.resume(ResumeRequest {})).unwrap();
    paused(&mut source, false);
    kill(&mut source);
    f.is_clean(&source.pids());
}

pub fn vm_goes_on_although_its_resume_fails_once() {
    let f = Fixture::new();
    let mut vm = f.start(vm(&f, "stutters")).unwrap();
    let done = save(&f, &vm, &dir(&f, "one"), false).unwrap();
    assert!(done.paused);
    f.wait(vm.client.resume(ResumeRequest {})).unwrap();
    paused(&mut vm, false);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn refused_save_leaves_nothing() {
    let f = Fixture::new();
    let mut vm = f.start(vm(&f, "unsavable")).unwrap();
    let directory = dir(&f, "one");
    fs::create_dir(&directory).unwrap();
    let error = save(&f, &vm, &directory, false).unwrap_err();
    assert_eq!(error.message(), "vhost-vsock cannot be saved");
    paused(&mut vm, false);
    not_removed_at_the_resume(&vm);
    // The directory was there before.
    assert_eq!(names(&directory), [""; 0]);
    for (path, reason) in [
        ("relative", "directory: relative is not an absolute path"),
        ("/proc/none", "/proc/none: No such file or directory (os error 2)"),
    ] {
        assert_eq!(
            save(&f, &vm, Path::new(path), false).unwrap_err().message(),
            reason
        );
    }
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn manifest_that_is_too_large_is_refused_before_the_save() {
    let f = Fixture::new();
    // Each number has a line of its own in the description.
    let config = MonitorConfig {
        vmi: serde_json::json!({"metadata": {}, "filler": vec![0; 1_500_000]}),
        ..f.config(vm(&f, "saves-slowly"))
    };
    let mut vm = f.start_config(&config).unwrap();
    let directory = dir(&f, "one");
    let error = save(&f, &vm, &directory, false).unwrap_err();
    let wanted = format!(
        "{}/snapshot.json: it would be larger than 8 MiB",
        directory.display()
    );
    assert!(error.message().starts_with(&wanted), "{}", error.message());
    assert!(!directory.exists());
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

/// The VM does not wait for the removal of what was written.
fn not_removed_at_the_resume(vm: &Vm<'_>) {
    eventually("it is removed later", || {
        vm.said().contains("memory has 1 links\n")
    });
}

pub fn interrupted_snapshot_leaves_nothing() {
    let f = Fixture::new();
    let mut vm = f.start(vm(&f, "saves-slowly")).unwrap();
    let directory = dir(&f, "one");
    let mut steps = begin(&f, &vm, &directory, false).unwrap();
    f.wait(steps.message()).unwrap().unwrap();
    assert!(directory.join("memory").exists());
    assert_eq!(
        snapshot::read(&directory).unwrap_err().to_string(),
        format!(
            "{} is not a complete snapshot: it was interrupted; remove it",
            directory.display()
        )
    );
    let busy = |error: Status| {
        assert_eq!(error.code(), Code::FailedPrecondition);
        error.message().to_owned()
    };
    let other = save(&f, &vm, &dir(&f, "two"), false).unwrap_err();
    assert!(busy(other).starts_with("a snapshot of the VM is being made already"));
    let resumed = f.wait(vm.client.resume(ResumeRequest {})).unwrap_err();
    assert!(busy(resumed).starts_with("a snapshot of the VM is being made: resume it"));
    let add = AddVolumeRequest {
        name: "more".into(),
        path: image(&f, "more.img").to_str().unwrap().into(),
        read_only: true,
        ..AddVolumeRequest::default()
    };
    let added = f.wait(vm.client.add_volume(add.clone())).unwrap_err();
    assert!(busy(added).starts_with("a snapshot of the VM is being made"));
    drop(steps);
    eventually("it is removed", || {
        vm.info().disks.len() >= 4 && !directory.exists()
    });
    paused(&mut vm, false);
    not_removed_at_the_resume(&vm);
    f.wait(vm.client.add_volume(add)).unwrap();

    // A pause of the user stays.
    let mut steps = begin(&f, &vm, &directory, true).unwrap();
    f.wait(steps.message()).unwrap().unwrap();
    f.wait(vm.client.pause(PauseRequest {})).unwrap();
    drop(steps);
    eventually("it is removed", || {
        vm.info().disks.len() >= 4 && !directory.exists()
    });
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(vm.status().paused);
    f.wait(vm.client.resume(ResumeRequest {})).unwrap();
    paused(&mut vm, false);
    // The end of the VM ends its snapshot.
    let mut steps = begin(&f, &vm, &directory, true).unwrap();
    f.wait(steps.message()).unwrap().unwrap();
    kill(&mut vm);
    finish(&f, &mut steps).unwrap_err();
    assert!(!directory.exists());
    f.is_clean(&vm.pids());
}

pub fn shutdown_gives_a_snapshot_up() {
    let f = Fixture::new();
    let mut vm = f.start(vm(&f, "saves-slowly")).unwrap();
    let directory = dir(&f, "one");
    let mut steps = begin(&f, &vm, &directory, false).unwrap();
    f.wait(steps.message()).unwrap().unwrap();
    let status = vm.ends(async |client| shut_down(client, Some(20)).await);
    assert_eq!(status.reason, "Poweroff");
    let refused = finish(&f, &mut steps).unwrap_err();
    let wanted = "the VM is being shut down, so the snapshot was given up";
    assert_eq!(refused.message(), wanted);
    assert!(!directory.exists());
    f.is_clean(&vm.pids());
}

pub fn vmm_that_dies_while_saving_leaves_nothing() {
    let f = Fixture::new();
    let vm = f.start(vm(&f, "dies-saving")).unwrap();
    let directory = dir(&f, "one");
    save(&f, &vm, &directory, false).unwrap_err();
    eventually("it is removed", || !directory.exists());
    eventually("the monitor ends", || !alive(vm.monitor));
    f.is_clean(&vm.pids());
}

pub fn plugged_volume_stays_plugged() {
    let f = Fixture::new();
    let mut source = f.start(vm(&f, "demo")).unwrap();
    let request = AddVolumeRequest {
        name: "more".into(),
        path: image(&f, "more.img").to_str().unwrap().into(),
        read_only: true,
        ..AddVolumeRequest::default()
    };
    f.wait(source.client.add_volume(request)).unwrap();
    let directory = dir(&f, "one");
    save(&f, &source, &directory, false).unwrap();
    let mut restored = restore(&f, &directory, "clone").unwrap();
    let disks = restored.info().disks;
    assert!(
        disks.iter().any(|disk| disk.name == "more" && disk.plugged),
        "{disks:?}"
    );
    let remove = RemoveVolumeRequest { name: "more".into() };
    f.wait(restored.client.remove_volume(remove)).unwrap();
    kill(&mut source);
    kill(&mut restored);
    f.is_clean(&[source.pids(), restored.pids()].concat());
}

pub fn damaged_snapshot_is_refused() {
    let f = Fixture::new();
    let mut source = f.start(vm(&f, "demo")).unwrap();
    let directory = dir(&f, "one");
    save(&f, &source, &directory, true).unwrap();
    let memory = directory.join("memory");
    fs::write(&memory, "mem").unwrap();
    let wanted = format!("{} has 3 bytes, not 6: the snapshot is damaged", memory.display());
    assert_eq!(refused(restore(&f, &directory, "clone")), wanted);
    fs::write(&memory, "memory").unwrap();
    // Refused by the VMM.
    let state = directory.join("state.json");
    let kept = fs::read(&state).unwrap();
    fs::write(&state, "newer".repeat(4) + "!").unwrap();
    assert_eq!(
        refused(restore(&f, &directory, "clone")),
        format!("{}: version: 9 is unknown", state.display())
    );
    fs::write(&state, kept).unwrap();
    // A link leads elsewhere.
    let seed = directory.join("disk-seed.img");
    fs::remove_file(&seed).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &seed).unwrap();
    let text = refused(restore(&f, &directory, "clone"));
    assert!(text.starts_with(&format!("{}: ", seed.display())), "{text}");
    fs::remove_file(&seed).unwrap();
    fs::write(&seed, [0; 2048]).unwrap();
    // The base of an overlay.
    fs::write(f.home().join("root.img"), [0; 4096]).unwrap();
    let text = refused(restore(&f, &directory, "clone"));
    assert!(
        text.contains("volume \"root\": ") && text.contains("has changed since the snapshot"),
        "{text}"
    );
    kill(&mut source);
    f.is_clean(&source.pids());
}
