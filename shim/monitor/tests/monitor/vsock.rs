//! Programs of the host and the guest's vsock device. What the fake guest does: see `FakeVsock`.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use husk_proto::shim::v1::KillRequest;

use super::fake_vmm::{ACCEPTS, ASKS, REFUSES};
use super::fixture::{Fixture, Vm, plan};

fn connected(vm: &Vm<'_>, line: &str) -> UnixStream {
    let mut stream = UnixStream::connect(vm.dir.path().join("vsock.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(line.as_bytes()).unwrap();
    stream
}

/// Reads to the end of the stream. A reset counts as the end: the other side had not read everything.
fn rest(mut stream: UnixStream) -> String {
    let mut text = String::new();
    match stream.read_to_string(&mut text) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error}"),
        _ => text,
    }
}

fn kill(vm: &mut Vm<'_>) {
    vm.ends(async |mut client| drop(client.kill(KillRequest {}).await.unwrap()));
}

pub fn programs_connect_to_the_guest() {
    let f = Fixture::new();
    let mut vm = f.start(plan("vsock")).unwrap();
    let mode = std::fs::metadata(vm.dir.path().join("vsock.sock"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o600);
    // What follows the line is the guest's.
    let stream = connected(&vm, &format!("CONNECT {ACCEPTS}\nsaid early "));
    (&stream).write_all(b"said late").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(rest(stream), "OK 1073741824\nsaid early said late");
    assert_eq!(rest(connected(&vm, &format!("CONNECT {REFUSES}\n"))), "");
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn the_guest_connects_to_programs() {
    let f = Fixture::new();
    let mut vm = f.start(plan("vsock")).unwrap();
    let path = vm.dir.path().join(format!("vsock.sock_{ASKS}"));
    // Nobody listens; nobody listens any more.
    assert_eq!(rest(connected(&vm, &format!("CONNECT {ASKS}\n"))), "refused");
    drop(UnixListener::bind(&path).unwrap());
    assert_eq!(rest(connected(&vm, &format!("CONNECT {ASKS}\n"))), "refused");
    std::fs::remove_file(&path).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    let asking = connected(&vm, &format!("CONNECT {ASKS}\n"));
    let (stream, _) = listener.accept().unwrap();
    assert_eq!(rest(stream), "from the guest");
    assert_eq!(rest(asking), "accepted");
    // The program's socket goes with the VM.
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn guest_that_connects_in_vain_does_not_fill_the_log() {
    let f = Fixture::new();
    let mut vm = f.start(plan("answers-nobody")).unwrap();
    for _ in 0..60 {
        assert_eq!(rest(connected(&vm, &format!("CONNECT {ASKS}\n"))), "");
    }
    let log = std::fs::read_to_string(vm.dir.monitor_log()).unwrap();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("not answered")).collect();
    // They take two windows at most.
    assert!((1..=40).contains(&lines.len()), "{}", lines.len());
    assert!(lines.iter().all(|line| line.len() < 1000), "{}", lines[0]);
    kill(&mut vm);
    f.is_clean(&vm.pids());
}

pub fn programs_that_say_nothing_hold_up_others_for_a_limited_time() {
    let f = Fixture::new();
    let mut vm = f.start(plan("vsock")).unwrap();
    for line in ["CONNECT\n", "GET / HTTP/1.1\r\n", &"C".repeat(1000)] {
        assert_eq!(rest(connected(&vm, line)), "", "{line}");
    }
    let silent: Vec<_> = (0..100).map(|_| connected(&vm, "CONNECT 1")).collect();
    let start = std::time::Instant::now();
    let last = connected(&vm, &format!("CONNECT {ACCEPTS}\n"));
    last.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(rest(last), "OK 1073741824\n");
    // Three turns of 32.
    assert!(start.elapsed() > Duration::from_secs(14), "{:?}", start.elapsed());
    for stream in silent.into_iter().take(96) {
        assert_eq!(rest(stream), "");
    }
    kill(&mut vm);
    f.is_clean(&vm.pids());
}
