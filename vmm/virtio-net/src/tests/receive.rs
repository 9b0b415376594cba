//! Frames for the driver.

use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::*;

#[test]
fn a_frame_takes_as_many_buffers_as_it_needs() {
    let mut guest = Guest::new();
    guest.offer(0, 200, 1024);
    for (seed, len) in [60, 1012, 1013, 2036, 2037, 5000, 60_000, 65_000, 14, 60_000, 100]
        .into_iter()
        .enumerate()
    {
        let mut bytes = with_header(&frame(MAC, len, seed as u8));
        bytes[1] = 1; // segmented: the MTU is not for it
        guest.peers[0].send(&bytes).unwrap();
        let received = guest.received(0);
        assert_eq!(
            usize::from(u16::from_le_bytes([received[10], received[11]])),
            (len + 12).div_ceil(1024)
        );
        assert!(received[12..] == bytes[12..], "a frame of {len} bytes");
        guest.offer(0, (len + 12).div_ceil(1024), 1024);
    }
    wait_until_equal(&(11, 0, 0), || {
        let received = guest.handle.received();
        (received.packets, received.dropped, received.errors)
    });
}

#[test]
fn received_frames_mark_the_dirty_bitmap() {
    let mut guest = Guest::new();
    guest.offer(0, 20, 2048);
    // The second frame does not fit into the buffers it is read into.
    for (len, dirty) in [(100, 1), (8000, 5)] {
        guest.peers[0].send(&with_header(&frame(MAC, len, 1))).unwrap();
        guest.received(0);
        let mem = guest.mem.memory();
        let region = mem.iter().next().unwrap();
        for (slot, (at, _)) in guest.buffers[0][..20].iter().enumerate() {
            let expected = slot < dirty;
            assert_eq!(region.bitmap().dirty_at(*at as usize), expected, "buffer {slot}");
        }
    }
}

#[test]
fn buffers_of_a_few_pieces_and_bytes_do_too() {
    let mut guest = Guest::new();
    for at in 0..100 {
        let at = RECEIVED + at * 0x100;
        guest.receive[0].add_indirect(
            TABLES + (at - RECEIVED),
            &[(at, 5, WRITE), (at + 5, 0, WRITE), (at + 5, 8, WRITE)],
        );
    }
    guest.receive[0].kick();
    let bytes = with_header(&frame(MAC, 1000, 3));
    guest.peers[0].send(&bytes).unwrap();
    let mut received = Vec::new();
    for place in 0..78_u64 {
        let (head, len) = guest.receive[0].wait();
        assert_eq!(u64::from(head), place);
        received.extend(guest.get(RECEIVED + place * 0x100, len as usize));
    }
    assert_eq!(received[..10], bytes[..10]);
    assert_eq!(received[10..12], 78_u16.to_le_bytes());
    assert!(received[12..] == bytes[12..]);
}

#[test]
fn a_frame_waits_for_buffers() {
    let mut guest = Guest::new();
    let bytes = with_header(&frame(MAC, 3000, 3));
    guest.peers[0].send(&bytes).unwrap();
    settle();
    for _ in 0..2 {
        guest.offer(0, 1, 1024);
        settle();
        assert_eq!(guest.receive[0].used(), None);
    }
    // A pause keeps the driver's buffers.
    guest.offer(0, 1, 1024);
    assert!(guest.received(0)[12..] == bytes[12..]);
}

#[test]
fn a_frame_that_no_ring_could_hold_is_dropped() {
    let mut guest = Guest::with(1, ALL, 4);
    guest.offer(0, 4, 1024);
    guest.peers[0].send(&with_header(&frame(MAC, 5000, 1))).unwrap();
    let bytes = with_header(&frame(MAC, 4000, 2));
    guest.peers[0].send(&bytes).unwrap();
    assert!(guest.received(0)[12..] == bytes[12..]);
    wait_until_equal(&1, || guest.handle.received().dropped);
}

#[test]
fn without_mergeable_buffers_a_frame_fits_or_is_dropped() {
    let mut guest = Guest::with(1, ALL & !MERGEABLE, 256);
    guest.offer(0, 10, 1526);
    guest.peers[0].send(&with_header(&frame(MAC, 1515, 1))).unwrap();
    let bytes = with_header(&frame(MAC, 1514, 2));
    guest.peers[0].send(&bytes).unwrap();
    let received = guest.received(0);
    assert_eq!(received[10..12], [1, 0], "section 5.1.6.4");
    assert!(received[12..] == bytes[12..]);
    wait_until_equal(&(1, 1), || {
        let received = guest.handle.received();
        (received.packets, received.dropped)
    });
}

#[test]
fn invalid_frames_are_not_received() {
    let mut guest = Guest::new();
    guest.offer(0, 200, 1024);
    let mut long = with_header(&frame(MAC, 70_000, 0));
    long[1] = 1;
    for bytes in [&long[..], &long[..25], &with_header(&frame(MAC, 9019, 0))] {
        guest.peers[0].send(bytes).unwrap();
    }
    let longest = with_header(&frame(MAC, 9018, 1));
    guest.peers[0].send(&longest).unwrap();
    assert!(guest.received(0)[12..] == longest[12..]);
    // The MTU is 9000.
    wait_until_equal(&(2, 1), || {
        let received = guest.handle.received();
        (received.errors, received.dropped)
    });
}

#[test]
fn a_load_arrives_in_order_with_few_interrupts() {
    for features in [ALL, ALL & !(1 << 29), ALL & !MERGEABLE] {
        let mut guest = Guest::with(1, features, 256);
        guest.offer(0, 255, 2048);
        for round in 0..40_u8 {
            for at in 0..20 {
                guest.peers[0]
                    .send(&with_header(&frame(MAC, 60 + 40 * usize::from(at), round ^ at)))
                    .unwrap();
            }
            for at in 0..20 {
                let expected = frame(MAC, 60 + 40 * usize::from(at), round ^ at);
                assert_eq!(guest.received(0)[12..], expected);
            }
            guest.offer(0, 20, 2048);
            if round % 16 == 15 {
                guest.pause();
            }
        }
        wait_until_equal(&800, || guest.handle.received().packets);
    }
}
