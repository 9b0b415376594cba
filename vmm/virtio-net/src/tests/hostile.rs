//! Drivers that break the rules: they harm their own device, and nothing else.

use husk_devices::virtio::testing::{INDIRECT, NEXT};
use proptest::prelude::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;
use crate::control_state::{Backend, ControlState, Datapath};
use crate::control_worker::ControlWorker;
use crate::handle::Shared;
use crate::pair_worker::pair_mailbox;
use crate::shared_throttle::SharedThrottle;

#[test]
fn a_broken_ring_sets_device_needs_reset() {
    type Act = fn(&mut Guest);
    let acts: [(&str, Act); 9] = [
        ("does not end", |guest| {
            guest.transmit[0].put(0, (SENT, 100, NEXT), 0);
            guest.transmit[0].offer(0);
            guest.transmit[0].kick();
        }),
        ("does not end", |guest| {
            guest.transmit[0].offer(5000);
            guest.transmit[0].kick();
        }),
        ("readable descriptor after", |guest| {
            guest.transmit[0].add(&[(SENT, 100, WRITE), (SENT, 100, 0)]);
            guest.transmit[0].kick();
        }),
        ("", |guest| {
            guest.transmit[0].set_available(1000);
            guest.transmit[0].kick();
        }),
        ("does not end", |guest| {
            guest.receive[0].add(&[(TABLES, 5, INDIRECT)]);
            guest.receive[0].kick();
        }),
        ("readable descriptor in", |guest| {
            guest.receive[0].add(&[(RECEIVED, 5, 0), (RECEIVED, 2048, WRITE)]);
            guest.receive[0].kick();
        }),
        ("too small for a header", |guest| guest.offer(0, 1, 11)),
        ("outside of guest memory", |guest| {
            guest.receive[0].add(&[(END as u64 - 10, 2048, WRITE)]);
            guest.receive[0].kick();
        }),
        ("control queue", |guest| {
            guest.control.add(&[(COMMANDS, 10, 0)]);
            guest.control.kick();
        }),
    ];
    let mut guest = Guest::with(2, ALL, 64);
    for (reason, act) in acts {
        guest.interrupts = Interrupts::new();
        guest.connect();
        act(&mut guest);
        let said = guest.broken();
        assert!(said.contains(reason), "{said}");
        // The rest of the device continues, and a new driver can use all of it.
        guest.handle.set_link(false);
        guest.handle.set_link(true);
        guest.connect();
        guest.offer(0, 1, 2048);
        guest.peers[0].send(&with_header(&frame(MAC, 60, 1))).unwrap();
        guest.received(0);
        assert_eq!(guest.command(&[4, 0, 2, 0]), 0);
    }
}

#[test]
fn a_broken_pair_does_not_keep_commands_waiting() {
    let mut guest = Guest::with(2, ALL, 64);
    guest.transmit[1].offer(5000);
    guest.transmit[1].kick();
    guest.broken();
    assert_eq!(guest.command(&[4, 0, 2, 0]), 0);
    assert_eq!(guest.command(&[0, 0, 0]), 0);
    assert_eq!(guest.net.quiesce().unwrap().len(), 5);
}

#[test]
fn a_broken_control_queue_does_not_keep_the_link_up() {
    let mut guest = Guest::new();
    guest.control.add(&[(COMMANDS, 10, 0)]);
    guest.control.kick();
    guest.broken();
    guest.link_goes_down();
    guest.offer(0, 10, 2048);
    guest.peers[0].send(&with_header(&frame(MAC, 60, 1))).unwrap();
    settle();
    assert_eq!(guest.receive[0].used(), None);
    guest.handle.set_link(true);
    let received = guest.receives_in_time(&with_header(&frame(MAC, 60, 2)));
    assert_eq!(received[12..], frame(MAC, 60, 2));
    assert_eq!(guest.net.quiesce().unwrap().len(), 3);
}

#[test]
fn a_ring_that_vhost_finds_malformed_does_not_keep_the_link_up() {
    let eventfd = || EventFd::new(EFD_NONBLOCK).unwrap();
    let (mailbox, inbox) = pair_mailbox().unwrap();
    let (tap, _peer) = UnixDatagram::pair().unwrap();
    let (interrupts, error, stop) = (Interrupts::new(), eventfd(), eventfd());
    let handle = NetHandle(Shared::new("test".into(), MAC, true, eventfd()));
    let backend = Backend::Workers(vec![mailbox]);
    let worker = ControlWorker {
        queue: None,
        state: ControlState::new(ALL, MAC),
        datapath: Datapath::new(vec![Arc::new(Tap::fake(tap.into()))], backend, true),
        mem: memory(&[(0, 0x1000)]),
        interrupt: Arc::clone(&interrupts) as _,
        shared: Arc::clone(&handle.0),
        throttle: SharedThrottle::new(),
        calls: Vec::new(),
        error: Some(error.try_clone().unwrap()),
    };
    thread::scope(|scope| {
        scope.spawn(|| worker.run(&stop));
        error.write(1).unwrap();
        let reason = wait_for("a reset", || interrupts.reset());
        assert!(reason.contains("malformed ring"), "{reason}");
        handle.set_link(false);
        assert!(!inbox.rules().link);
        stop.write(1).unwrap();
    });
}

#[test]
fn a_flood_of_commands_is_slowed_down_and_can_be_stopped() {
    let mut guest = Guest::with(2, ALL, 64);
    let start = Instant::now();
    for round in 0..160_u8 {
        assert_eq!(guest.command(&[4, 0, 1 + (round + 1) % 2, 0]), 0);
    }
    assert!(
        start.elapsed() > Duration::from_millis(100),
        "{:?}",
        start.elapsed()
    );
    // A ring that never ends: each look finds as many commands again.
    guest.put(COMMANDS, &[4, 0, 2, 0]);
    guest
        .control
        .add(&[(COMMANDS, 4, 0), (COMMANDS + 0x100, 1, WRITE)]);
    let head = 0;
    let flooding = Instant::now();
    while flooding.elapsed() < Duration::from_millis(50) {
        guest.control.offer(head);
        guest.control.kick();
        guest.control.wait();
    }
    guest.net.reset();
}

#[test]
fn a_reset_does_not_lift_the_limit_of_costly_commands() {
    let mut guest = Guest::with(2, ALL, 64);
    let start = Instant::now();
    for _ in 0..40 {
        guest.connect();
        for round in 0..5 {
            assert_eq!(guest.command(&[4, 0, 2 - round % 2, 0]), 0);
        }
    }
    let elapsed = start.elapsed();
    assert!(elapsed > Duration::from_millis(300), "{elapsed:?}");
}

#[test]
fn drivers_that_change_the_tap_are_slowed_down() {
    let mut guest = Guest::new();
    let start = Instant::now();
    // The activation sets offloads, and the reset takes them back.
    (0..100).for_each(|_| guest.connect());
    let elapsed = start.elapsed();
    assert!(elapsed > Duration::from_millis(300), "{elapsed:?}");
    thread::sleep(Duration::from_millis(50));
    assert_eq!(guest.net.resources.throttle.lock().wait(Instant::now()), None);
    // The tap stays as it is.
    (0..200).for_each(|_| guest.pause());
    guest.features = 0;
    (0..200).for_each(|_| guest.connect());
    assert!(!guest.net.resources.throttle.lock().is_exhausted());
}

#[test]
fn buffers_offered_again_and_again_are_not_kept() {
    let mut guest = Guest::with(1, ALL, 64);
    guest.offer(0, 1, 64);
    for _ in 0..50 {
        for _ in 0..40 {
            guest.receive[0].offer(0);
        }
        guest.receive[0].kick();
        guest.peers[0].send(&with_header(&frame(MAC, 1500, 1))).unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    guest.net.reset();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// With any content of the rings, the device stops on request, and a new driver can use it.
    #[test]
    fn nothing_in_the_rings_is_trusted(
        descriptors in prop::collection::vec(
            (0..24_u64, 0..0x3000_u32, any::<u8>(), 0..20_u16), 1..40),
        heads in prop::collection::vec((0..3_usize, 0..18_u16), 1..60),
        garbage in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        let mut guest = Guest::with(1, ALL, 16);
        guest.put(SENT, &garbage);
        guest.put(COMMANDS, &garbage);
        let places = [SENT, RECEIVED, COMMANDS, ring(0), TABLES, END as u64 - 100];
        for (at, (place, len, flags, next)) in descriptors.into_iter().enumerate() {
            let address = places[place as usize % 6] + place;
            let descriptor = (address, len, u16::from(flags & 7));
            let queues = [&guest.receive[0], &guest.transmit[0], &guest.control];
            queues[at % 3].put(at as u16 / 3, descriptor, next);
        }
        // The worker that takes the frames may have ended.
        guest.peers[0].set_nonblocking(true).unwrap();
        for (queue, head) in heads {
            let driver = [&mut guest.receive[0], &mut guest.transmit[0], &mut guest.control];
            let [receive, transmit, control] = driver;
            let driver = match queue { 0 => receive, 1 => transmit, _ => control };
            driver.offer(head);
            driver.kick();
            let _ = guest.peers[0].send(&with_header(&frame(MAC, 100, 0)));
        }
        while guest.peers[0].recv(&mut [0; 100]).is_ok() {}
        guest.connect();
        guest.offer(0, 4, 2048);
        guest.peers[0].send(&with_header(&frame(MAC, 60, 1))).unwrap();
        guest.received(0);
    }
}
