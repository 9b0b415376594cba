//! Starts of VMs.

use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use husk_monitor::client::connect;
use husk_monitor::launch::LaunchError;
use husk_proto::shim::v1::{KillRequest, Phase};
use husk_vmi::DiskSource;

use super::fixture::{Fixture, disk, eventually, exit_of, plan};

fn refusal(f: &Fixture, plan: husk_vmi::VmPlan) -> (String, String) {
    match f.start(plan).map(|vm| vm.monitor) {
        Err(LaunchError::Failed { reason, message }) => (reason, message),
        other => panic!("{other:?}"),
    }
}

pub fn started_vm_is_listed() {
    let f = Fixture::new();
    let mut vm = f.start(plan("demo")).unwrap();
    assert_eq!(f.state().list().unwrap(), [vm.dir.clone()]);
    assert_eq!(vm.dir.monitor_pid(), Some(vm.monitor));
    let info = vm.info();
    assert_eq!(
        (info.name.as_str(), info.vcpus, info.guest_memory_bytes),
        ("demo", 2, 128 << 20)
    );
    assert_eq!(
        (info.monitor_pid, info.booted_from.as_str()),
        (vm.monitor, "a play")
    );
    let status = info.status.unwrap();
    assert_eq!((status.phase(), status.paused), (Phase::Running, false));
    let timeline = status.timeline.unwrap();
    let times = [
        timeline.monitor_started,
        timeline.vmm_started,
        timeline.created,
        timeline.running,
    ];
    assert!(times[0] > 0 && times.is_sorted(), "{times:?}");
    let kept: husk_vmi::VmPlan = serde_json::from_slice(&std::fs::read(vm.dir.plan()).unwrap()).unwrap();
    assert_eq!(kept, plan("demo"));
    assert!(std::fs::read_to_string(vm.dir.vmi()).unwrap().contains("demo"));
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    f.is_clean(&vm.pids());
}

pub fn duplicate_name_is_refused() {
    let f = Fixture::new();
    let mut vm = f.start(plan("demo")).unwrap();
    let (reason, message) = refusal(&f, plan("demo"));
    assert_eq!(
        (reason.as_str(), message.as_str()),
        ("AlreadyRunning", "VM default/demo is already running")
    );
    assert_eq!(vm.status().phase(), Phase::Running);
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    let mut again = f.start(plan("demo")).unwrap();
    again.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    f.is_clean(&again.pids());
}

pub fn vmm_refusal_is_reported_and_cleaned_up() {
    let f = Fixture::new();
    let refused = refusal(&f, plan("refused"));
    assert_eq!(
        refused,
        ("StartFailed".into(), "config.memory: too much of it".into())
    );
    let refused = refusal(&f, plan("no-kernel"));
    assert_eq!(
        refused,
        ("BootFailed".into(), "disk data: no partition table".into())
    );
    f.is_clean(&[]);
}

pub fn early_vmm_death_is_reported() {
    let f = Fixture::new();
    assert_eq!(
        refusal(&f, plan("dies-early")),
        ("VmmFailed".into(), "out of luck".into())
    );
    f.is_clean(&[]);
}

pub fn bad_environment_variable_is_named() {
    let f = Fixture::new();
    let vmm = "set HUSK_VMM to the path of husk-vmm, or leave it out";
    let missing = "No such file or directory (os error 2)";
    for (name, value, error) in [
        (
            "HUSK_VMM",
            "/bin/true",
            format!("HUSK_VMM=/bin/true ended before it answered: {vmm}"),
        ),
        (
            "HUSK_VMM",
            "/bin/false",
            format!("HUSK_VMM=/bin/false ended before it answered: {vmm}"),
        ),
        (
            "HUSK_VMM",
            "no/vmm",
            format!("HUSK_VMM=no/vmm cannot be started: {missing}: {vmm}"),
        ),
        (
            "HUSK_KVM",
            "/nonexistent",
            format!(
                "no access to KVM: HUSK_KVM=/nonexistent: {missing}: set it to a KVM device, or leave it out"
            ),
        ),
        (
            "HUSK_SCRATCH_DIR",
            "/nonexistent",
            format!(
                "volume \"data\": HUSK_SCRATCH_DIR=/nonexistent: {missing}: set HUSK_SCRATCH_DIR to a directory with \
                 room on a real disk"
            ),
        ),
    ] {
        let mut command = f.monitor();
        command.env(name, value);
        let mut plan = plan("demo");
        let capacity_bytes = 1 << 20;
        plan.disks
            .push(disk("data", DiskSource::EmptyDisk { capacity_bytes }));
        match f.wait(husk_monitor::launch::launch(command, &f.config(plan))) {
            Err(LaunchError::Failed { message, .. }) => assert_eq!(message, error),
            other => panic!("{other:?}"),
        }
    }
    f.is_clean(&[]);
}

pub fn bad_volume_is_reported_and_cleaned_up() {
    let f = Fixture::new();
    let missing = f.home().join("missing.img");
    let mut plan = plan("demo");
    plan.disks.push(disk("data", DiskSource::File(missing.clone())));
    let (reason, message) = refusal(&f, plan);
    assert_eq!(reason, "StartFailed");
    let wanted = format!(
        "volume \"data\": {}: No such file or directory (os error 2)",
        missing.display()
    );
    assert_eq!(message, wanted);
    f.is_clean(&[]);
}

pub fn refused_image_is_named() {
    let f = Fixture::new();
    let path = f.home().join("disk.qcow2");
    std::fs::write(&path, b"QFI\xfb").unwrap();
    let image = DiskSource::ContainerDisk {
        path: path.clone(),
        image_path: None,
    };
    let mut plan = plan("picky");
    plan.disks.push(disk("root", image));
    let (reason, message) = refusal(&f, plan);
    assert_eq!(reason, "StartFailed");
    let wanted = format!("volume \"root\": {}: qcow2: 4 bytes are no image", path.display());
    assert_eq!(message, wanted);
    f.is_clean(&[]);
}

pub fn all_descriptors_of_many_disks_arrive() {
    let f = Fixture::new();
    let mut plan = plan("demo");
    for n in 0..600 {
        plan.disks.push(disk(
            &format!("d{n}"),
            DiskSource::EmptyDisk {
                capacity_bytes: 1 << 20,
            },
        ));
    }
    let mut vm = f.start(plan).unwrap();
    eventually("the VMM has them all", || {
        vm.said().contains(&format!("600 disks of {} bytes\n", 600 << 20))
    });
    // The monitor keeps a reference to each for snapshots, and none open.
    let open = std::fs::read_dir(format!("/proc/{}/fd", vm.monitor))
        .unwrap()
        .count();
    assert!(open < 640, "{open}");
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    f.is_clean(&vm.pids());
}

pub fn long_names_work() {
    let f = Fixture::new();
    let mut plan = plan(&"n".repeat(253));
    plan.namespace = "s".repeat(63);
    let mut vm = f.start(plan).unwrap();
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
    f.is_clean(&vm.pids());
}

pub fn vm_ends_when_its_launcher_dies() {
    let f = Fixture::new();
    let mut monitor = f
        .monitor()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let config = serde_json::to_vec(&f.config(plan("slow"))).unwrap();
    monitor.stdin.take().unwrap().write_all(&config).unwrap();
    drop(monitor.stdout.take());
    assert!(!exit_of(&mut monitor).success());
    f.is_clean(&[monitor.id()]);
}

pub fn hanging_start_can_be_killed() {
    let f = Fixture::new();
    let config = serde_json::to_vec(&f.config(plan("hangs"))).unwrap();
    let mut monitor = f
        .monitor()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    monitor.stdin.take().unwrap().write_all(&config).unwrap();
    let mut client = None;
    // The socket exists a moment before it accepts connections.
    eventually("it is reached", || {
        let found = f.state().find("default", "hangs").ok();
        client = found.and_then(|dir| f.wait(connect(&dir)).ok());
        client.is_some()
    });
    let mut client = client.unwrap();
    f.wait(async {
        client.kill(KillRequest {}).await.unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    });
    let output = monitor.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains(r#"{"failed":{"reason":"Killed""#));
    f.is_clean(&[]);
}
