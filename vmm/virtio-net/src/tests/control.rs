//! Control commands and their effects.

use super::*;

const MODE_PROMISCUOUS_OFF: &[u8] = &[0, 0, 0];

/// The frames that arrive, by the last byte of their seed.
fn arrives(guest: &mut Guest, frames: &[Vec<u8>]) -> Vec<bool> {
    let last = with_header(&frame([0xff; 6], 100, 0));
    for bytes in frames {
        guest.peers[0].send(&with_header(bytes)).unwrap();
    }
    guest.peers[0].send(&last).unwrap();
    let mut received = Vec::new();
    loop {
        let bytes = guest.received(0)[12..].to_vec();
        guest.offer(0, 1, 2048);
        if bytes == last[12..] {
            break;
        }
        received.push(bytes);
    }
    frames.iter().map(|bytes| received.contains(bytes)).collect()
}

#[test]
fn frames_are_filtered_by_the_drivers_rules() {
    let mut guest = Guest::new();
    guest.offer(0, 50, 2048);
    let vlan = [&MAC[..], &PEER, &[0x81, 0, 0x20, 7, 8, 0], &[7; 50]].concat();
    let group = [1, 0, 0x5e, 0, 0, 1];
    let frames = [frame(MAC, 60, 1), frame(PEER, 60, 2), frame(group, 60, 3), vlan];
    assert_eq!(arrives(&mut guest, &frames), [true; 4]);
    assert_eq!(guest.command(MODE_PROMISCUOUS_OFF), 0);
    assert_eq!(arrives(&mut guest, &frames), [true, false, false, false]);
    assert_eq!(guest.command(&[2, 0, 7, 0]), 0);
    assert_eq!(guest.command(&[0, 1, 1]), 0, "ALLMULTI");
    assert_eq!(arrives(&mut guest, &frames), [true, false, true, true]);
    let tables = [&[1, 0, 1, 0, 0, 0][..], &PEER, &[0, 0, 0, 0]].concat();
    assert_eq!((guest.command(&tables), guest.command(&[0, 1, 0])), (0, 0));
    guest.pause();
    assert_eq!(arrives(&mut guest, &frames), [true, true, false, true]);
    let own = [&[1, 1][..], &PEER].concat();
    let none = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!((guest.command(&own), guest.command(&none)), (0, 0));
    assert_eq!(guest.command(&[2, 1, 7, 0]), 0);
    assert_eq!(arrives(&mut guest, &frames), [false, true, false, false]);
    assert_eq!(
        (guest.config()[..6].to_vec(), guest.handle.mac()),
        (PEER.to_vec(), PEER)
    );
    guest.connect();
    guest.offer(0, 50, 2048);
    assert_eq!(guest.handle.mac(), MAC, "a new driver finds the device as it was");
    assert_eq!(arrives(&mut guest, &frames), [true; 4]);
}

#[test]
fn invalid_commands_are_refused() {
    let mut guest = Guest::with(2, ALL, 256);
    for command in [
        &[][..],
        &[0],
        &[9, 9, 9],
        &[1, 1, 3, 0, 0, 0, 0, 1],
        &[1, 1, 0, 0, 0, 0, 0, 0],
        &[4, 0, 0, 0],
        &[4, 0, 3, 0],
        &[5, 0, 0, 4, 0, 0, 0, 0, 0, 0],
    ] {
        assert_eq!(guest.command(command), 1, "{command:?}");
    }
    assert_eq!(guest.command(&[5, 0, 0x82, 0, 0, 0, 0, 0, 0, 0]), 0);
    assert_eq!(guest.interrupts.reset(), None);
}

#[test]
fn pairs_come_and_go() {
    let mut guest = Guest::with(3, ALL, 256);
    assert_eq!(guest.config()[8..10], [3, 0]);
    (0..3).for_each(|pair| guest.offer(pair, 50, 2048));
    // A socket keeps its frames while its pair is disabled; a tap does not.
    let mut waiting = [0; 3];
    for (round, count) in [1, 3, 2, 3, 1, 2].into_iter().enumerate() {
        assert_eq!(guest.command(&[4, 0, count, 0]), 0);
        if round == 3 {
            guest.pause();
        }
        for (pair, waiting) in waiting.iter_mut().enumerate() {
            let bytes = frame(MAC, 60, round as u8);
            guest.peers[pair].send(&with_header(&bytes)).unwrap();
            *waiting += 1;
            if pair < usize::from(count) {
                (1..std::mem::take(waiting)).for_each(|_| drop(guest.received(pair)));
                assert_eq!(guest.received(pair)[12..], bytes);
                guest.transmit(pair, &with_header(&bytes), 100);
                guest.transmit[pair].kick();
                guest.transmit[pair].wait();
                assert_eq!(guest.out(pair), with_header(&bytes));
            } else {
                settle();
                assert_eq!(guest.receive[pair].used(), None);
            }
        }
    }
}

#[test]
fn a_driver_without_pairs_finds_its_control_queue() {
    let mut guest = Guest::with(2, ALL & !(1 << 22), 256);
    guest.offer(0, 10, 2048);
    assert_eq!(guest.command(MODE_PROMISCUOUS_OFF), 0);
    assert_eq!(guest.command(&[4, 0, 1, 0]), 1);
    let mut indices: Vec<_> = guest.net.quiesce().unwrap().iter().map(|q| q.index).collect();
    indices.sort_unstable();
    assert_eq!(indices, [0, 1, 2, 3], "also those it does not use");
}

#[test]
fn a_cable_is_pulled_and_plugged_in() {
    let mut guest = Guest::new();
    guest.offer(0, 10, 2048);
    assert_eq!(guest.config()[6], 1);
    guest.link_goes_down();
    assert_eq!((guest.config()[6], guest.interrupts.config()), (0, 1));
    guest.peers[0].send(&with_header(&frame(MAC, 60, 1))).unwrap();
    settle();
    assert_eq!(guest.receive[0].used(), None);
    guest.pause();
    settle();
    assert_eq!(guest.receive[0].used(), None);
    guest.handle.set_link(true);
    guest.handle.set_link(true);
    assert_eq!((guest.config()[6], guest.interrupts.config()), (1, 2));
    let received = guest.receives_in_time(&with_header(&frame(MAC, 60, 2)));
    assert_eq!(received[12..], frame(MAC, 60, 2), "what came before is lost");
}

#[test]
fn announce_sets_the_status_bit_until_acknowledged() {
    let mut guest = Guest::new();
    assert!(guest.handle.announce());
    assert_eq!((guest.config()[6], guest.interrupts.config()), (3, 1));
    assert_eq!(guest.command(&[3, 0]), 0);
    assert_eq!(guest.config()[6], 1);
    guest.net.reset();
    assert!(!guest.handle.announce(), "nobody there");
    guest.features &= !(1 << 21);
    guest.connect();
    assert!(!guest.handle.announce(), "nobody who could");
    assert_eq!(guest.command(&[3, 0]), 1);
}
