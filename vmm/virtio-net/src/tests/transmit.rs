//! Frames of the driver.

use husk_devices::virtio::testing::WRITE;

use super::*;

#[test]
fn frames_are_sent_with_any_split_into_descriptors() {
    let mut guest = Guest::new();
    for (seed, size) in [1, 5, 12, 13, 100, 10_000].into_iter().enumerate() {
        let bytes = with_header(&frame(PEER, 200, seed as u8));
        let head = guest.transmit(0, &bytes, size);
        guest.transmit[0].kick();
        assert_eq!(guest.transmit[0].wait(), (head, 0));
        assert_eq!(guest.out(0), bytes, "in pieces of {size}");
    }
    let bytes = with_header(&frame(PEER, 60_000, 9));
    guest.put(SENT, &bytes);
    let pieces: Vec<_> = (0..60)
        .map(|at| (SENT + at * 1000, if at == 59 { 1012 } else { 1000 }, 0))
        .collect();
    guest.transmit[0].add_indirect(TABLES, &pieces);
    guest.transmit[0].kick();
    assert_eq!(guest.out(0), bytes);
    guest.transmit[0].wait();
    wait_until_equal(&(7, 61_200, 0, 0), || {
        let sent = guest.handle.sent();
        (sent.packets, sent.bytes, sent.dropped, sent.errors)
    });
}

#[test]
fn the_header_that_the_tap_gets_is_made_here() {
    let mut guest = Guest::new();
    let body = frame(PEER, 3000, 0);
    // NEEDS_CSUM and DATA_VALID, TCPv4, and a number of buffers that means nothing.
    let bytes = [&[3, 1, 54, 0, 0xe8, 3, 34, 0, 16, 0, 7, 7][..], &body].concat();
    guest.transmit(0, &bytes, 4096);
    guest.transmit[0].kick();
    let expected = [&[1, 1, 54, 0, 0xe8, 3, 34, 0, 16, 0, 0, 0][..], &body].concat();
    assert_eq!(guest.out(0), expected);
}

#[test]
fn invalid_frames_are_dropped_and_counted() {
    let mut guest = Guest::new();
    let good = with_header(&frame(PEER, 60, 0));
    let segments = [&[1, 3, 54, 0, 0, 4, 34, 0, 16, 0, 0, 0][..], &good[12..]].concat();
    guest.transmit(0, &good[..5], 100);
    guest.transmit(0, &good[..20], 100);
    guest.transmit(0, &segments, 100);
    guest.transmit(0, &vec![0; 0x1_2000], 0x1_2000);
    guest.transmit[0].add(&[(SENT, 100, 0), (SENT, 100, WRITE)]);
    guest.transmit[0].add(&[(SENT, 100, WRITE)]);
    guest.transmit[0].add(&[(END as u64 - 50, 100, 0)]);
    guest.transmit[0].add(&[(SENT, 12, 0), (END as u64 - 50, 100, 0)]);
    guest.transmit(0, &good, 100);
    guest.transmit[0].kick();
    for _ in 0..9 {
        assert_eq!(guest.transmit[0].wait().1, 0);
    }
    assert_eq!(guest.out(0), good, "only that");
    wait_until_equal(&(1, 8), || {
        let sent = guest.handle.sent();
        (sent.packets, sent.errors)
    });
    assert_eq!(guest.interrupts.reset(), None);
}

#[test]
fn a_tap_that_is_full_makes_the_driver_wait() {
    let mut guest = Guest::new();
    let frames: Vec<_> = (0..200)
        .map(|seed| with_header(&frame(PEER, 5000, seed)))
        .collect();
    for round in frames.chunks(25) {
        for bytes in round {
            guest.transmit(0, bytes, 10_000);
        }
        guest.transmit[0].kick();
        settle();
        for bytes in round {
            assert!(guest.out(0) == *bytes);
        }
    }
    for _ in 0..200 {
        guest.transmit[0].wait();
    }
    assert_eq!(guest.handle.sent().dropped, 0);
}

#[test]
fn a_batch_is_one_interrupt_if_any() {
    let mut guest = Guest::new();
    let before = guest.interrupts.queue();
    guest.transmit[0].set_used_event(9);
    for _ in 0..10 {
        guest.transmit(0, &with_header(&frame(PEER, 60, 0)), 100);
    }
    guest.transmit[0].kick();
    for _ in 0..10 {
        guest.transmit[0].wait();
        guest.out(0);
    }
    wait_for("an interrupt", || {
        (guest.interrupts.queue() > before).then_some(())
    });
    settle();
    assert_eq!(guest.interrupts.queue(), before + 1);
}
