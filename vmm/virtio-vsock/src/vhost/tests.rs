use std::fs::File;

use husk_devices::virtio::testing::{Interrupts, wait_for};
use husk_vhost::VhostCall;

use super::*;

fn event() -> EventFd {
    EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).unwrap()
}

/// A worker that forwards the interrupts of queue 1, with the far ends of its eventfds.
fn worker(interrupts: &Arc<Interrupts>) -> (Worker<()>, EventFd, EventFd) {
    let (call, error) = (event(), event());
    let calls = vec![VhostCall {
        queue: 1,
        event: call.try_clone().unwrap(),
    }];
    let worker = NotifierWorker {
        interrupt: Arc::clone(interrupts) as _,
        calls,
        error: error.try_clone().unwrap(),
    };
    let worker = Worker::spawn(ThreadRole::Vsock, "vsock", |_| {}, move |stop| worker.run(stop)).unwrap();
    (worker, call, error)
}

#[test]
fn files_other_than_vhost_are_refused() {
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    assert!(VhostVsock::new(3, null.into()).is_err());
}

#[test]
fn interrupts_without_a_vector_are_forwarded() {
    let interrupts = Interrupts::new();
    let (worker, call, _error) = worker(&interrupts);
    call.write(1).unwrap();
    wait_for("an interrupt", || (interrupts.queue() == 1).then_some(()));
    // One that vhost raised just before its end is not lost.
    call.write(1).unwrap();
    worker.stop().unwrap();
    assert_eq!(interrupts.queue(), 2);
    assert_eq!(interrupts.reset(), None);
}

#[test]
fn a_malformed_ring_sets_device_needs_reset() {
    let interrupts = Interrupts::new();
    let (worker, _call, error) = worker(&interrupts);
    error.write(1).unwrap();
    let reason = wait_for("DEVICE_NEEDS_RESET", || interrupts.reset());
    assert_eq!(reason, "vhost: malformed ring");
    worker.stop().unwrap();
}
