//! Driver changes and pauses.

use std::fs::File;

use husk_devices::pci::fake::FakeMsi;
use husk_devices::virtio::ActivateError;
use husk_devices::virtio::transport::VirtioPci;
use husk_devices::virtio::transport::fake::{FakeIoEventFds, WINDOW};

use super::*;
use crate::{MAX_PAIRS, NetSetup, QueuePair};

#[test]
fn a_second_driver_can_take_over() {
    let mut guest = Guest::with(2, ALL, 256);
    for round in 0..10 {
        guest.offer(0, 100, 2048);
        for _ in 0..20 {
            guest.transmit(0, &with_header(&frame(PEER, 60, round)), 100);
            guest.peers[0].send(&with_header(&frame(MAC, 60, round))).unwrap();
        }
        guest.transmit[0].kick();
        guest.net.reset();
        let before = guest.get(ring(0), 0x3000);
        thread::sleep(Duration::from_millis(5));
        assert!(
            guest.get(ring(0), 0x3000) == before,
            "memory is the guest's again"
        );
        guest.connect();
        guest.offer(0, 1, 2048);
        guest.peers[0].send(&with_header(&frame(MAC, 60, round))).unwrap();
        assert_eq!(guest.received(0)[12..26], frame(MAC, 60, 0)[..14]);
        // The socket, unlike a tap, is not emptied by a reset.
        guest.peers[0].set_nonblocking(true).unwrap();
        while guest.peers[0].recv(&mut [0; 100]).is_ok() {}
        guest.peers[0].set_nonblocking(false).unwrap();
        guest.connect();
    }
}

#[test]
fn a_pause_loses_no_frame() {
    let mut guest = Guest::new();
    guest.offer(0, 200, 1024);
    for round in 0..30_u8 {
        for at in 0..5 {
            let bytes = frame(MAC, 2000, round * 5 + at);
            guest.transmit(0, &with_header(&bytes), 500);
            guest.peers[0].send(&with_header(&bytes)).unwrap();
        }
        if round % 2 == 0 {
            guest.transmit[0].kick();
        }
        guest.pause();
        guest.transmit[0].kick();
        for at in 0..5 {
            let expected = frame(MAC, 2000, round * 5 + at);
            assert!(guest.received(0)[12..] == expected);
            assert!(guest.out(0)[12..] == expected);
            guest.transmit[0].wait();
        }
        guest.offer(0, 10, 1024);
    }
}

#[test]
fn queues_are_restored_as_they_were() {
    let mut guest = Guest::with(2, ALL, 64);
    guest.offer(0, 20, 2048);
    settle();
    let queues = guest.net.quiesce().unwrap();
    assert!(guest.net.quiesce().is_none());
    let mut places: Vec<_> = queues
        .iter()
        .map(|active| {
            let queue = active.queue.state();
            (active.index, queue.next_avail, queue.next_used)
        })
        .collect();
    places.sort_unstable();
    let expected: Vec<_> = (0..5).map(|index| (index, 0, 0)).collect();
    assert_eq!(places, expected, "buffers that no frame fills are not taken");
}

#[test]
fn unsuitable_parameters_are_refused() {
    let null = || File::open("/dev/null").unwrap().into();
    let pair = |vhost: bool| QueuePair {
        tap: null(),
        vhost: vhost.then(null),
    };
    for (mtu, pairs, reason) in [
        (None, vec![], "1 to 127 queue pairs"),
        (Some(67), vec![pair(false)], "MTU"),
        (
            None,
            vec![pair(true), pair(false)],
            "for all queue pairs or for none",
        ),
        (None, vec![pair(false)], "not a queue of a tap"),
    ] {
        let setup = NetSetup {
            id: "x".into(),
            mac: MAC,
            mtu,
            link: true,
            pairs,
        };
        let error = Net::new(setup).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn the_largest_device_fits_the_transport() {
    let (tap, _peer) = UnixDatagram::pair().unwrap();
    let taps: Vec<_> = (0..MAX_PAIRS).map(|_| tap.try_clone().unwrap()).collect();
    let (net, _) = over(&taps);
    let ioeventfds = Arc::new(FakeIoEventFds::default());
    VirtioPci::new(
        Box::new(net),
        memory(&[(0, END)]),
        &FakeMsi::default(),
        ioeventfds,
        WINDOW,
    )
    .unwrap();
}

#[test]
fn one_pair_is_the_minimum() {
    let mut guest = Guest::new();
    guest.net.reset();
    for (queues, missing) in [(vec![], 0), (vec![guest.receive[0].queue(true)], 1)] {
        let activation = Activation {
            mem: guest.mem.clone(),
            features: ALL,
            queues,
            interrupt: Arc::clone(&guest.interrupts) as _,
        };
        match guest.net.activate(activation) {
            Err(ActivateError::MissingQueue(index)) => assert_eq!(index, missing),
            other => panic!("{other:?}"),
        }
    }
    guest.connect();
    guest.offer(0, 1, 2048);
    guest.peers[0].send(&with_header(&frame(MAC, 60, 1))).unwrap();
    guest.received(0);
}
