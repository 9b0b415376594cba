//! Commands that reach a VM by its network, tested with a stub monitor whose VM has the address 127.0.0.1.

mod support;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use husk_proto::shim::v1::Phase;
use husk_proto::vmm::v1::ExitReason;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};
use support::{StubMonitor, husk, output, told};

/// Starts `husk port-forward demo PORTS`; returns the local addresses.
fn forward(root: &Path, ports: &[&str]) -> (Child, Vec<String>) {
    let mut child = husk(root, &[&["port-forward", "demo"], ports].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let mut local = Vec::new();
    for port in ports {
        let line = lines.next().unwrap().unwrap();
        let rest = line.strip_prefix("Forwarding from ").unwrap();
        let (from, to) = rest.split_once(" -> ").unwrap();
        assert_eq!(port.rsplit(':').next(), Some(to));
        local.push(from.to_owned());
    }
    (child, local)
}

/// Waits for the exit; returns the status and stderr.
fn end(child: Child) -> (i32, String) {
    let (code, _, stderr) = told(&child.wait_with_output().unwrap());
    (code, stderr)
}

#[test]
fn a_port_leads_to_the_vm_until_its_end() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "default", "demo");
    let guest = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = guest.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in guest.incoming().flatten() {
            std::thread::spawn(move || {
                let mut text = String::new();
                (&stream).read_to_string(&mut text).unwrap();
                (&stream).write_all(text.to_uppercase().as_bytes()).unwrap();
            });
        }
    });
    let closed = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let ports = [format!("0:{port}"), format!("tcp/:{closed}")];
    let (child, local) = forward(root.path(), &[&ports[0], &ports[1]]);
    // In parallel.
    let clients: Vec<_> = (0..3).map(|_| TcpStream::connect(&local[0]).unwrap()).collect();
    for mut client in clients {
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        client.write_all(b"hello").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "HELLO");
    }
    // Without a listener in the guest the connection is closed.
    let mut refused = TcpStream::connect(&local[1]).unwrap();
    match refused.read(&mut [0]) {
        Ok(0) => {}
        Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("{other:?}"),
    }
    stub.end(Phase::Succeeded, ExitReason::Poweroff, "the guest powered off");
    let said = format!("demo: 127.0.0.1:{closed}: Connection refused\ndemo has ended\n");
    assert_eq!(end(child), (0, said));
}

#[test]
fn the_limit_of_files_is_raised_and_reported_once() {
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "default", "demo");
    let guest = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("0:{}", guest.local_addr().unwrap().port());
    for (hard, told) in [(4096, 0), (24, 1)] {
        let mut command = husk(root.path(), &["port-forward", "demo", &port]);
        let limit = Rlimit {
            current: Some(24),
            maximum: Some(hard),
        };
        // SAFETY: setrlimit may be called between fork and exec.
        unsafe { command.pre_exec(move || Ok(setrlimit(Resource::Nofile, limit)?)) };
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.as_mut().unwrap());
        stdout.read_line(&mut line).unwrap();
        let local = line.split_whitespace().nth(2).unwrap();
        let clients: Vec<_> = (0..40).map(|_| TcpStream::connect(local).unwrap()).collect();
        std::thread::sleep(Duration::from_millis(500));
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let (code, stderr) = end(child);
        assert_eq!(
            (code, stderr.matches("Too many open files").count()),
            (130, told),
            "{stderr}"
        );
        drop(clients);
    }
}

#[test]
fn ctrl_c_ends_the_forwarding_and_not_the_vm() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "default", "demo");
    let (child, local) = forward(root.path(), &["0:80"]);
    let (code, _, stderr) = told(&output(
        root.path(),
        &["port-forward", "demo", &format!("{}:80", local[0])],
    ));
    assert_eq!(
        (code, stderr),
        (1, format!("error: {}: Address already in use\n", local[0]))
    );
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(end(child), (130, String::new()));
    assert_eq!(stub.status().phase(), Phase::Running);
}

#[test]
fn a_signal_that_was_ignored_at_the_start_stays_so() {
    let root = tempfile::tempdir().unwrap();
    let _stub = StubMonitor::start(root.path(), "default", "demo");
    let forward = husk(root.path(), &["port-forward", "demo", "0:80"]);
    let mut child = Command::new("sh")
        .args(["-c", "trap '' HUP && exec \"$0\" \"$@\""])
        .arg(forward.get_program())
        .args(forward.get_args())
        .env("HUSK_RUNTIME_DIR", root.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.as_mut().unwrap());
    stdout.read_line(&mut line).unwrap();
    assert!(line.starts_with("Forwarding from "), "{line}");
    kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(child.try_wait().unwrap(), None);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(end(child), (143, String::new()));
}

#[test]
fn ssh_is_the_systems() {
    let root = tempfile::tempdir().unwrap();
    let state = root.path().join("state");
    let _stub = StubMonitor::start(&state, "default", "demo");
    let bin = root.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let told_with =
        |path: &Path, words: &[&str]| told(&husk(&state, words).env("PATH", path).output().unwrap());
    let missing = "error: ssh was not found on PATH: install the OpenSSH client (package openssh-client)\n";
    assert_eq!(told_with(&bin, &["ssh", "demo"]), (1, "".into(), missing.into()));

    let ssh = bin.join("ssh");
    std::fs::write(&ssh, "#!/bin/sh\nfor word; do echo \"$word\"; done\nexit 7\n").unwrap();
    std::fs::set_permissions(&ssh, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (code, stdout, _) = told_with(&bin, &["ssh", "demo", "-l", "debian", "--", "-v", "uname", "-a"]);
    let known_hosts = format!(
        "UserKnownHostsFile=\"{}/default/demo/known_hosts\"",
        state.display()
    );
    let wanted = [
        "-o",
        "StrictHostKeyChecking=accept-new",
        "-o",
        "UpdateHostKeys=no",
        "-o",
        &known_hosts,
        "-l",
        "debian",
        "127.0.0.1",
        "-v",
        "uname",
        "-a",
    ];
    assert_eq!((code, stdout.lines().collect::<Vec<_>>()), (7, wanted.to_vec()));
}

#[test]
fn interfaces_are_added_removed_and_unplugged() {
    let root = tempfile::tempdir().unwrap();
    let stub = StubMonitor::start(root.path(), "default", "demo");
    let run = |words: &str| {
        let (code, _, stderr) = told(&output(root.path(), &words.split(' ').collect::<Vec<_>>()));
        (code, stderr)
    };
    let done = |text: &str| (0, format!("demo: {text}\n"));
    assert_eq!(run("addinterface demo blue"), done("added interface blue"));
    assert_eq!(stub.status().message, r#"blue "" """#);
    run("addinterface demo blue --device net1 --mac 02:00:00:00:00:10");
    assert_eq!(stub.status().message, r#"blue "net1" "02:00:00:00:00:10""#);
    assert_eq!(run("removeinterface demo blue"), done("removed interface blue"));
    assert_eq!(
        run("removeinterface demo red"),
        (1, "error: there is none\n".into())
    );
    assert_eq!(run("link demo blue down"), done("interface blue is down"));
    assert_eq!(stub.status().message, "blue false");
    assert_eq!(run("link demo blue up"), done("interface blue is up"));
}
