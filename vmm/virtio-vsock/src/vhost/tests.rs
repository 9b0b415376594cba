use std::fs::File;

use husk_devices::virtio::testing::{Driver, Interrupts, memory, wait_for};
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
fn queues_that_vhost_does_not_release_are_lost() {
    let (worker, ..) = worker(&Interrupts::new());
    let mem = memory(&[(0, 0x4000)]);
    let queue = |index: u16| Driver::new(&mem, index, 16, 0x1000 * u64::from(index + 1)).queue(true);
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    let mut vsock = VhostVsock {
        guest_cid: 3,
        file: VhostFile::failing(null.into()),
        active: Some(ActiveVhost {
            worker,
            in_vhost: [queue(0), queue(1)],
            event_queue: Some(queue(2)),
            mem: mem.memory().into_inner(),
        }),
    };
    let left = vsock.quiesce().unwrap();
    assert_eq!(left.iter().map(|queue| queue.index).collect::<Vec<_>>(), [2]);
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
