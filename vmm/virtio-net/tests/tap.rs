//! The device on a real tap.

mod guest;
mod packets;
mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use guest::{Guest, MAC, PEER, frame};
use husk_devices::page_log::PageLog;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::{wait_for, wait_until_equal};
use packets::{checksum_is_right, tcp, udp};
use wire::{TIMEOUT, Wire, filtered, isolated};

/// Makes of each function a test of the workers and one of vhost.
macro_rules! with_both_datapaths {
    ($($body:ident)*) => {
        mod workers {
            $(#[test]
            fn $body() {
                super::isolated(concat!("workers::", stringify!($body)), || super::$body(false));
            })*
        }
        mod vhost_net {
            $(#[test]
            #[ignore = "needs /dev/vhost-net"]
            fn $body() {
                super::isolated(concat!("vhost_net::", stringify!($body)), || super::$body(true));
            })*
        }
    };
}

with_both_datapaths! {
    frames_pass_both_ways
    checksums_are_offloaded_if_negotiated
    segmentation_is_offloaded_if_negotiated
    the_kernel_filters_for_the_guest
    flows_spread_over_the_pairs_in_use
    pairs_change_under_load
    the_link_goes_down_and_up
    a_broken_ring_sets_device_needs_reset
    drivers_pause_and_leave_under_load
    a_load_arrives_without_loss
    a_saved_device_goes_on_without_loss
    pages_of_received_frames_are_dirty
}

/// Time to wait for a frame that must not arrive.
const QUIET: Duration = Duration::from_millis(200);
/// VIRTIO_NET_HDR_F_NEEDS_CSUM
const NEEDS_CSUM: u8 = 1;
/// Guest offloads.
const CSUM: u64 = 1 << 1;
const TSO4: u64 = 1 << 7;

fn frames_pass_both_ways(vhost: bool) {
    let mut guest = Guest::new(1, 0, vhost);
    let wire = Wire::new();
    for (seed, len) in [60, 61, 600, 1514].into_iter().enumerate() {
        let out = frame(PEER, len, seed as u8);
        guest.send(0, [0; 12], &out);
        assert_eq!(wire.receive(), ([0; 10], out));
        let into = frame(MAC, len, !seed as u8);
        wire.send([0; 10], &into);
        let (header, received) = guest.receive(0);
        assert_eq!(header, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(received, into);
    }
    if vhost {
        return;
    }
    wait_until_equal(&(4, 60 + 61 + 600 + 1514), || {
        let received = guest.handle.received();
        (received.packets, received.bytes)
    });
    wait_until_equal(&(4, 0), || {
        let sent = guest.handle.sent();
        (sent.packets, sent.errors)
    });
}

fn checksums_are_offloaded_if_negotiated(vhost: bool) {
    let mut guest = Guest::new(1, 0, vhost);
    let wire = Wire::new();
    let partial = udp(PEER, 7, 100);
    assert!(!checksum_is_right(&partial));
    guest.send(0, [NEEDS_CSUM, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0], &partial);
    let (header, received) = wire.receive();
    assert_eq!(
        (header[0] & NEEDS_CSUM, header[6..].to_vec()),
        (1, vec![34, 0, 6, 0])
    );
    assert_eq!(received, partial);

    let partial = udp(MAC, 7, 100);
    wire.send([NEEDS_CSUM, 0, 0, 0, 0, 0, 34, 0, 6, 0], &partial);
    let (header, received) = guest.receive(0);
    assert_eq!((header[0], &header[6..10]), (NEEDS_CSUM, &[34, 0, 6, 0][..]));
    assert_eq!(received, partial);
    guest.set_offloads(0);
    wire.send([NEEDS_CSUM, 0, 0, 0, 0, 0, 34, 0, 6, 0], &partial);
    let (header, received) = guest.receive(0);
    assert_eq!(header[0] & NEEDS_CSUM, 0);
    assert!(checksum_is_right(&received));
    // A driver that did not negotiate it.
    guest.connect(CSUM | TSO4);
    wire.send([NEEDS_CSUM, 0, 0, 0, 0, 0, 34, 0, 6, 0], &partial);
    assert!(checksum_is_right(&guest.receive(0).1));
}

fn segmentation_is_offloaded_if_negotiated(vhost: bool) {
    let mut guest = Guest::new(1, 0, vhost);
    let wire = Wire::new();
    let large = tcp(60_000);
    // NEEDS_CSUM, TCPv4, headers of 54 bytes, segments of 1448, checksum at 34 + 16.
    let header = [NEEDS_CSUM, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0];
    let with_buffers = [&header[..], &[0, 0]].concat();
    guest.send(0, with_buffers.try_into().unwrap(), &large);
    let (seen, received) = wire.receive();
    assert_eq!((seen[1], &seen[4..6]), (1, &header[4..6]));
    assert!(received == large);

    for offloads in [CSUM | TSO4, CSUM, CSUM | TSO4, 0] {
        guest.set_offloads(offloads);
        wire.send(header, &large);
        if offloads & TSO4 != 0 {
            let (seen, received) = guest.receive(0);
            assert_eq!((seen[1], &seen[4..6]), (1, &header[4..6]));
            assert_eq!(
                usize::from(u16::from_le_bytes([seen[10], seen[11]])),
                (large.len() + 12).div_ceil(guest::BUFFER as usize)
            );
            assert!(received == large);
            continue;
        }
        let mut data = Vec::new();
        while data.len() < 60_000 {
            let (seen, received) = guest.receive(0);
            assert_eq!((seen[1], seen[10..].to_vec()), (0, vec![1, 0]));
            assert!(offloads != 0 || checksum_is_right(&received));
            data.extend_from_slice(&received[54..]);
        }
        assert!(data == large[54..]);
    }
    assert_eq!(guest.handle.received().dropped, 0);
}

fn the_kernel_filters_for_the_guest(vhost: bool) {
    let mut guest = Guest::new(1, 0, vhost);
    let wire = Wire::new();
    let group = [1, 0, 0x5e, 0, 0, 9];
    let frames = [
        frame(PEER, 60, 1),
        frame(group, 60, 2),
        frame([0xff; 6], 60, 3),
        frame(MAC, 60, 4),
    ];
    let expect = |guest: &mut Guest, expected: &[usize]| {
        let before = filtered();
        frames.iter().for_each(|frame| wire.send([0; 10], frame));
        for &at in expected {
            assert_eq!(guest.receive(0).1, frames[at]);
        }
        // The others were never read.
        wait_until_equal(&(4 - expected.len() as u64), || filtered() - before);
    };
    expect(&mut guest, &[0, 1, 2, 3]);
    guest.command(&[0, 0, 0]);
    expect(&mut guest, &[2, 3]);
    guest.command(&[0, 1, 1]);
    expect(&mut guest, &[1, 2, 3]);
    guest.command(&[&[1, 0, 1, 0, 0, 0][..], &PEER, &[1, 0, 0, 0], &group].concat());
    guest.command(&[0, 1, 0]);
    expect(&mut guest, &[0, 1, 2, 3]);
    guest.command(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    expect(&mut guest, &[2, 3]);
    guest.net.reset();
    guest.connect(0);
    expect(&mut guest, &[0, 1, 2, 3]);
}

/// Sends so many flows to the guest, and returns how many arrive in each pair.
fn flows(guest: &mut Guest, wire: &Wire, pairs: usize, count: u16) -> Vec<usize> {
    let mut arrived = vec![0; pairs];
    for port in 0..count {
        wire.send([0; 10], &udp(MAC, 1000 + port, 60));
    }
    let deadline = Instant::now() + TIMEOUT;
    while arrived.iter().sum::<usize>() < count.into() {
        assert!(Instant::now() < deadline, "{arrived:?} of {count}");
        for (pair, arrived) in arrived.iter_mut().enumerate() {
            while guest.try_receive(pair).is_some() {
                *arrived += 1;
            }
        }
    }
    arrived
}

fn flows_spread_over_the_pairs_in_use(vhost: bool) {
    let mut guest = Guest::new(3, 0, vhost);
    let wire = Wire::new();
    assert_eq!(flows(&mut guest, &wire, 3, 64), [64, 0, 0]);
    for count in [3, 1, 2, 3, 2, 1, 3] {
        guest.use_pairs(count.into());
        let arrived = flows(&mut guest, &wire, 3, 64);
        let used = arrived.iter().filter(|arrived| **arrived != 0).count();
        assert_eq!(used, usize::from(count), "{arrived:?}");
        assert!(arrived[..count.into()].iter().all(|arrived| *arrived != 0));
        for pair in 0..count.into() {
            guest.send(pair, [0; 12], &frame(PEER, 60, count));
            assert_eq!(wire.receive().1, frame(PEER, 60, count));
        }
        guest.pause();
        assert_eq!(flows(&mut guest, &wire, 3, 64), arrived, "over a pause too");
    }
    guest.connect(0);
    assert_eq!(
        flows(&mut guest, &wire, 3, 64),
        [64, 0, 0],
        "a new driver has one"
    );
}

fn the_link_goes_down_and_up(vhost: bool) {
    let mut guest = Guest::new(1, 0, vhost);
    let wire = Wire::new();
    guest.handle.set_link(false);
    if vhost {
        // The device leaves the driver's frames in the queue, so that a test cannot see when the link is down.
        thread::sleep(QUIET);
    } else {
        wait_for("a link that is down", || {
            guest.send(0, [0; 12], &frame(PEER, 60, 0));
            (guest.handle.sent().dropped > 0).then_some(())
        });
    }
    wire.send([0; 10], &frame(MAC, 60, 1));
    thread::sleep(QUIET);
    assert!(guest.try_receive(0).is_none());
    guest.handle.set_link(true);
    // Until the link is up for the device too, frames are lost.
    let received = wait_for("a frame", || {
        wire.send([0; 10], &frame(MAC, 60, 2));
        thread::sleep(Duration::from_millis(10));
        guest.try_receive(0)
    });
    assert_eq!(received.1, frame(MAC, 60, 2));
    guest.send(0, [0; 12], &frame(PEER, 60, 3));
    // A frame sent while the link went down may precede it.
    let seen = wait_for("the guest's frame", || {
        let (_, seen) = wire.receive();
        (seen != frame(PEER, 60, 0)).then_some(seen)
    });
    assert_eq!(seen, frame(PEER, 60, 3));
}

fn a_broken_ring_sets_device_needs_reset(vhost: bool) {
    let mut guest = Guest::new(2, 0, vhost);
    let wire = Wire::new();
    guest.break_ring(0);
    wait_for("a reset", || guest.interrupts.reset());
    guest.connect(0);
    guest.use_pairs(2);
    for pair in 0..2 {
        guest.send(pair, [0; 12], &frame(PEER, 60, 1));
        assert_eq!(wire.receive().1, frame(PEER, 60, 1));
    }
    assert_eq!(flows(&mut guest, &wire, 2, 64).iter().sum::<usize>(), 64);
}

/// Ends the load, also if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Lets the host send flows while `act` is called several times.
fn under_load(guest: &mut Guest, mut act: impl FnMut(&mut Guest, u16)) {
    let wire = Wire::new();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = Stop(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                (0..32).for_each(|port| wire.send([0; 10], &udp(MAC, 1000 + port, 500)));
                thread::sleep(Duration::from_millis(1));
            }
        });
        for round in 0..30 {
            act(guest, round);
            let pair = usize::from(round) % guest.pairs_in_use;
            assert_eq!(guest.receive(pair).1[..12], udp(MAC, 0, 0)[..12]);
            guest.send(pair, [0; 12], &frame(PEER, 60, 1));
        }
    });
    assert_eq!(guest.interrupts.reset(), None);
}

fn pairs_change_under_load(vhost: bool) {
    let mut guest = Guest::new(4, 0, vhost);
    under_load(&mut guest, |guest, round| guest.use_pairs(1 + round * 7 % 4));
}

fn drivers_pause_and_leave_under_load(vhost: bool) {
    let mut guest = Guest::new(2, 0, vhost);
    under_load(&mut guest, |guest, round| match round % 5 {
        0 => guest.connect(0),
        1 => guest.use_pairs(2),
        2 => {
            guest.handle.set_link(false);
            guest.handle.set_link(true);
        }
        _ => guest.pause(),
    });
}

fn a_saved_device_goes_on_without_loss(vhost: bool) {
    let mut guest = Guest::new(1, 0, vhost);
    let wire = Wire::new();
    guest.set_offloads(CSUM);
    // MAC_TABLE_SET with a group, then no promiscuous mode: the tap filters.
    let group = [1, 0, 0x5e, 0, 0, 9];
    guest.command(&[&[1, 0, 0, 0, 0, 0, 1, 0, 0, 0][..], &group].concat());
    guest.command(&[0, 0, 0]);
    for round in 0..40_u8 {
        let before = filtered();
        let into = [frame(MAC, 600, round), frame(group, 60, round)];
        wire.send([0; 10], &frame(PEER, 60, round));
        into.iter().for_each(|bytes| wire.send([0; 10], bytes));
        if round % 2 == 0 {
            guest.reload();
        }
        assert_eq!([guest.receive(0).1, guest.receive(0).1], into);
        assert_eq!(filtered(), before + 1, "the filter is in force");
        let out: Vec<_> = (0..8).map(|at| frame(PEER, 100 + at, round)).collect();
        guest.send_all(0, &out);
        guest.reload();
        out.iter().for_each(|bytes| assert!(wire.receive().1 == *bytes));
    }
    let partial = udp(MAC, 7, 100);
    wire.send([NEEDS_CSUM, 0, 0, 0, 0, 0, 34, 0, 6, 0], &partial);
    assert_eq!(guest.receive(0).0[0], NEEDS_CSUM, "the offload is in force");
    assert_eq!(guest.interrupts.reset(), None);
}

fn a_load_arrives_without_loss(vhost: bool) {
    for without in [0, 1 << 15] {
        let mut guest = Guest::new(1, without, vhost);
        let wire = Wire::new();
        for round in 0..400_usize {
            let len = |at: usize| 60 + (round * 37 + at * 131) % 1450;
            let seed = |at: usize| (round ^ at) as u8;
            let out: Vec<_> = (0..32).map(|at| frame(PEER, len(at), seed(at))).collect();
            for at in 0..32 {
                wire.send([0; 10], &frame(MAC, len(at), seed(at)));
            }
            guest.send_all(0, &out);
            for (at, expected) in out.iter().enumerate() {
                assert!(guest.receive(0).1 == frame(MAC, len(at), seed(at)));
                assert!(wire.receive().1 == *expected);
            }
        }
        assert_eq!(guest.interrupts.reset(), None);
        drop(guest);
    }
}

fn pages_of_received_frames_are_dirty(vhost: bool) {
    let mut guest = Guest::new(1, 0, vhost);
    let wire = Wire::new();
    let log = Arc::new(PageLog::new(16 << 20));
    let receive = |guest: &mut Guest, seed| {
        let into = frame(MAC, 600, seed);
        wire.send([0; 10], &into);
        assert_eq!(guest.receive(0).1, into);
    };
    for round in 0..3 {
        guest.restart_with_log(Some(&log));
        receive(&mut guest, round);
        assert!(guest.received_is_dirty(&log), "round {round}");
    }
    guest.restart_with_log(None);
    receive(&mut guest, 3);
    assert_eq!(guest.received_is_dirty(&log), !vhost);
}
