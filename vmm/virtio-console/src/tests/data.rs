//! Bytes between guest and host.

use std::io::{ErrorKind, Write};
use std::net::Shutdown;

use super::*;

/// Receives this many bytes from a port.
fn received(guest: &mut Guest, port: u16, len: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while bytes.len() < len {
        bytes.extend(guest.next(2 + 2 * port));
    }
    bytes
}

/// Writes until the socket is full. Returns the number of bytes.
fn fill(host: &mut UnixStream, seed: u8) -> usize {
    host.set_nonblocking(true).unwrap();
    let mut total = 0;
    loop {
        match host.write(&pattern(total + 1000, seed)[total..]) {
            Ok(count) => total += count,
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => panic!("{e}"),
        }
    }
    host.set_nonblocking(false).unwrap();
    total
}

#[test]
fn bytes_pass_in_both_directions() {
    let mut guest = Guest::open(2);
    for (round, len) in [1, 2, 100, 5000, 30_000].into_iter().enumerate() {
        let (there, back) = (pattern(len, round as u8), pattern(len, !(round as u8)));
        guest.transmit(2, &there);
        assert!(guest.heard(2, len) == there);
        guest.queues[7].wait();
        let mut host = guest.hosts[1].try_clone().unwrap();
        let sent = back.clone();
        let sender = thread::spawn(move || host.write_all(&sent).unwrap());
        assert!(received(&mut guest, 2, len) == back);
        sender.join().unwrap();
    }
    assert_eq!(guest.queues[4].used(), None, "the other port is silent");
}

#[test]
fn bytes_for_the_guest_wait_until_it_opens_the_port() {
    let mut guest = Guest::open(1);
    guest.tell(1, PORT_OPEN, 0);
    guest.hosts[0].write_all(b"hello").unwrap();
    settle();
    assert_eq!(guest.queues[4].used(), None);
    guest.tell(1, PORT_OPEN, 1);
    assert_eq!(guest.next(4), b"hello");
}

#[test]
fn a_host_that_does_not_read_holds_the_guests_buffers_and_no_other_port() {
    let mut guest = Guest::open(2);
    let mut sent = Vec::new();
    // Until a buffer is not taken.
    loop {
        let bytes = pattern(20_000, sent.len() as u8);
        guest.transmit(1, &bytes);
        sent.extend(bytes);
        settle();
        if guest.queues[5].used().is_none() {
            break;
        }
    }
    guest.transmit(2, b"still here");
    assert_eq!(guest.heard(2, 10), b"still here");
    assert_eq!(guest.queues[5].used(), None);
    // A pause in the middle of a buffer neither loses nor repeats bytes.
    guest.pause();
    settle();
    guest.pause();
    let len = sent.len();
    assert!(guest.heard(1, len) == sent);
    guest.queues[5].wait();
    guest.transmit(1, b"go on");
    assert_eq!(guest.heard(1, 5), b"go on");
}

#[test]
fn a_guest_that_does_not_read_holds_the_host_and_no_other_port() {
    let mut guest = Guest::open(2);
    let len = fill(&mut guest.hosts[0], 3);
    // The device takes what the guest has buffers for, and no more.
    settle();
    let more = fill(&mut guest.hosts[0].try_clone().unwrap(), 3);
    assert!(more <= usize::from(SIZE) * BUFFER as usize + 4096, "{more}");
    guest.hosts[1].write_all(b"still here").unwrap();
    assert_eq!(guest.next(6), b"still here");
    let bytes = received(&mut guest, 1, len + more);
    assert!(bytes == [pattern(len, 3), pattern(more, 3)].concat());
}

#[test]
fn the_driver_notifies_of_receive_buffers_while_the_device_has_none() {
    let mut guest = Guest::open(1);
    guest.hosts[0].write_all(b"one").unwrap();
    assert_eq!(guest.next(4), b"one");
    assert!(!guest.queues[4].wants_kick(false, 0));
    // All buffers, and bytes that find none.
    fill(&mut guest.hosts[0], 1);
    wait_for("a request to notify", || {
        guest.queues[4].wants_kick(false, 0).then_some(())
    });
    guest.queues[4].used().unwrap();
    guest.queues[4].offer(0);
    guest.queues[4].kick();
    let mut used = 1;
    wait_for("the buffer that was given back", || {
        used += usize::from(guest.queues[4].used().is_some());
        (used == usize::from(SIZE) + 1).then_some(())
    });
}

#[test]
fn bytes_for_nobody_are_discarded() {
    let mut guest = Guest::open(1);
    drop(guest.hosts.remove(0));
    guest.expect(&[message(1, PORT_OPEN, 0)]);
    for _ in 0..40 {
        guest.transmit(1, &pattern(20_000, 0));
        guest.queues[5].wait();
    }
    // Port 0, which is there for drivers that know no other.
    guest.console.reset();
    let mut output = Driver::new(&guest.mem, 1, SIZE, ring(1));
    guest.put(ring(1), &[0; 0x1000]);
    guest.activate(vec![output.queue(false)], 0);
    output.add(&[(SENT, 100, 0)]);
    output.kick();
    assert_eq!(output.wait().1, 0);
}

#[test]
fn the_last_bytes_of_a_host_arrive_before_its_end() {
    let mut guest = Guest::open(1);
    // Two buffers, for three of bytes.
    let queues = guest.console.quiesce().unwrap();
    guest.queues[4].set_available(2);
    guest.activate(queues, MULTIPORT);
    let bytes = pattern(3 * BUFFER as usize, 9);
    guest.hosts[0].write_all(&bytes).unwrap();
    drop(guest.hosts.remove(0));
    settle();
    assert_eq!(guest.queues[2].used(), None);
    guest.queues[4].set_available(SIZE);
    guest.queues[4].kick();
    assert!(received(&mut guest, 1, bytes.len()) == bytes);
    guest.expect(&[message(1, PORT_OPEN, 0)]);
}

#[test]
fn the_last_bytes_of_a_host_arrive_though_it_takes_none() {
    let mut guest = Guest::open(1);
    // Two buffers, for three of bytes.
    let queues = guest.console.quiesce().unwrap();
    guest.queues[4].set_available(2);
    let bytes = pattern(3 * BUFFER as usize, 9);
    guest.hosts[0].write_all(&bytes).unwrap();
    drop(guest.hosts.remove(0));
    guest.activate(queues, MULTIPORT);
    for _ in 0..2 {
        guest.transmit(1, b"for nobody");
        guest.queues[5].wait();
    }
    guest.queues[4].set_available(SIZE);
    guest.queues[4].kick();
    assert!(received(&mut guest, 1, bytes.len()) == bytes);
    guest.expect(&[message(1, PORT_OPEN, 0)]);
}

#[test]
fn a_host_that_sends_no_more_counts_as_closed() {
    let mut guest = Guest::open(1);
    guest.hosts[0].shutdown(Shutdown::Write).unwrap();
    guest.expect(&[message(1, PORT_OPEN, 0)]);
}
