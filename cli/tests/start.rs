//! Starts that need no working VM.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use support::{husk, told};

const VALID: &str = "\
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: demo}
spec:
  domain:
    resources: {requests: {memory: 128Mi}}
    devices: {}
";

#[test]
fn a_doubtful_start_has_a_note() {
    let root = tempfile::tempdir().unwrap();
    let image = root.path().join("disk.img");
    std::fs::write(&image, b"QFI\xfb").unwrap();
    let text = VALID.replace("128Mi", "60Ti").replace(
        "devices: {}",
        "devices: {disks: [{name: root, disk: {bus: virtio}}]}\n  volumes: [{name: root, persistentVolumeClaim: {claimName: c}}]",
    );
    let manifest = root.path().join("vm.yaml");
    std::fs::write(&manifest, text).unwrap();
    let mut command = husk(
        &root.path().join("run"),
        &["run", manifest.to_str().unwrap(), "--volume"],
    );
    command
        .arg(format!("root={}", image.display()))
        .env("HUSK_KVM", "/dev/null")
        .env("HUSK_VMM", "/bin/false");
    let (code, _, stderr) = told(&command.output().unwrap());
    assert_eq!(code, 1);
    for warning in [
        "warning: spec.domain.resources.requests.memory: 60Ti exceeds the memory of this host, ".to_owned(),
        format!(
            "warning: volume \"root\": {} starts with a qcow2 header but is served raw; ",
            image.display()
        ),
    ] {
        assert!(stderr.contains(&warning), "{stderr}");
    }
}

/// The boot of the machine ends when its units are ready.
#[test]
fn the_unit_of_a_vm_that_waits_is_ready() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("data/objects/default/virtualmachine");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("demo.yaml"), "kind:").unwrap();
    let path = root.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut service = husk(&root.path().join("run"), &["service", "default:demo"])
        .env("HUSK_DATA_DIR", root.path().join("data"))
        .env("NOTIFY_SOCKET", &path)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut told = String::new();
    while !told.contains("next attempt") {
        let mut message = [0; 4096];
        let length = socket.recv(&mut message).expect("a message");
        told += std::str::from_utf8(&message[..length]).unwrap();
    }
    kill_process(Pid::from_child(&service), Signal::TERM).unwrap();
    assert!(service.wait().unwrap().success());
    assert!(told.contains("READY=1\n"), "{told}");
}

#[test]
fn a_wrong_monitor_is_named() {
    let root = tempfile::tempdir().unwrap();
    let manifest = root.path().join("vm.yaml");
    std::fs::write(&manifest, VALID).unwrap();
    let hint = "set HUSK_MONITOR to the path of husk-monitor, or leave it out\n";
    for (program, reason) in [
        (
            "/nonexistent",
            "HUSK_MONITOR=/nonexistent cannot be started: No such file or directory (os error 2): ",
        ),
        (
            "/bin/true",
            "HUSK_MONITOR=/bin/true ended before the VM ran: `husk run -v` may show the reason: ",
        ),
    ] {
        let mut command = husk(&root.path().join("run"), &["run", manifest.to_str().unwrap()]);
        command
            .args(["--detach", "--kernel", "/proc/version"])
            .env("HUSK_KVM", "/dev/null")
            .env("HUSK_MONITOR", program);
        let (code, _, stderr) = told(&command.output().unwrap());
        assert_eq!(code, 1);
        assert!(
            stderr.ends_with(&format!("error: demo: {reason}{hint}")),
            "{stderr}"
        );
    }
}

#[test]
fn a_signal_during_the_start_leaves_nothing() {
    let root = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = root.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let manifest = file("vm.yaml", VALID);
    let vmm = file("vmm", "#!/bin/sh\nexec sleep 60\n");
    std::fs::set_permissions(&vmm, std::fs::Permissions::from_mode(0o755)).unwrap();
    let runtime = root.path().join("run");
    let mut command = husk(&runtime, &["run", manifest.to_str().unwrap()]);
    let child = command
        .args(["--kernel", "/proc/version"])
        .env("HUSK_KVM", "/dev/null")
        .env("HUSK_VMM", vmm)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let state = husk_monitor::state::RuntimeDir::at(&runtime);
    let end = std::time::Instant::now() + Duration::from_secs(30);
    while state.list().unwrap().is_empty() {
        assert!(std::time::Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let (code, _, stderr) = told(&child.wait_with_output().unwrap());
    assert_eq!(state.list().unwrap(), []);
    assert!(
        stderr.ends_with("interrupted by SIGINT before all VMs were running: all were stopped\n"),
        "{stderr}"
    );
    assert_eq!(code, 130);
}

#[test]
fn sigterm_before_the_vm_runs_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = root.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let manifest = file("vm.yaml", VALID);
    let vmm = file("vmm", "#!/bin/sh\nexec sleep 60\n");
    std::fs::set_permissions(&vmm, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = husk(&root.path().join("run"), &["run", manifest.to_str().unwrap()]);
    let mut child = command
        .args(["--kernel", "/proc/version"])
        .env("HUSK_KVM", "/dev/null")
        .env("HUSK_VMM", vmm)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    // The handlers are installed by then.
    while !line.contains("demo: starting") {
        line.clear();
        assert!(stderr.read_line(&mut line).unwrap() > 0);
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(
        rest,
        "interrupted by SIGTERM before all VMs were running: all were stopped\n"
    );
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_wrong_import_program_is_named() {
    let root = tempfile::tempdir().unwrap();
    let mut command = husk(
        &root.path().join("run"),
        &["images", "pull", "registry.example/image:tag"],
    );
    command
        .env("HUSK_DATA_DIR", root.path().join("data"))
        .env("HUSK_IMPORT", "/nonexistent");
    let (code, _, stderr) = told(&command.output().unwrap());
    assert_eq!(code, 1);
    assert_eq!(
        stderr,
        "error: HUSK_IMPORT=/nonexistent cannot be started: No such file or directory: \
         set HUSK_IMPORT to the path of husk-import, or leave it out\n"
    );
}
