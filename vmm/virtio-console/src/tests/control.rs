//! Control messages.

use super::*;

#[test]
fn ports_are_announced_named_and_opened() {
    let mut guest = Guest::new(2);
    let mut config = [0xff; 12];
    guest.console.read_config(0, &mut config);
    assert_eq!(config, [0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(guest.console.queue_max_sizes().len(), 8);
    guest.tell(u32::MAX, DEVICE_READY, 1);
    guest.expect(&[message(1, DEVICE_ADD, 1), message(2, DEVICE_ADD, 1)]);
    guest.tell(2, PORT_READY, 1);
    let name = [&message(2, PORT_NAME, 1)[..], b"port2"].concat();
    guest.expect(&[name, message(2, PORT_OPEN, 1)]);
    wait_for("an interrupt", || (guest.interrupts.queue() > 0).then_some(()));
    settle();
    assert_eq!(guest.queues[2].used(), None, "nothing else is said");
}

#[test]
fn the_host_learns_when_the_guest_opens_and_closes_a_port() {
    let mut guest = Guest::open(2);
    let told = |name: &str, open| (name.to_owned(), open);
    // The reset before a driver closes all.
    let opened = guest.opens().split_off(2);
    assert_eq!(opened, [told("port1", true), told("port2", true)]);
    // The state is reported when it changes.
    for value in [1, 0, 0, 5] {
        guest.tell(2, PORT_OPEN, value);
    }
    assert_eq!(guest.opens(), [told("port2", false), told("port2", true)]);
    guest.console.reset();
    assert_eq!(guest.opens(), [told("port1", false), told("port2", false)]);
}

#[test]
fn messages_without_meaning_have_no_effect() {
    let mut guest = Guest::new(1);
    guest.tell(u32::MAX, DEVICE_READY, 0);
    guest.opens();
    guest.tell(u32::MAX, DEVICE_READY, 1);
    guest.expect(&[message(1, DEVICE_ADD, 1)]);
    for (id, event) in [
        (u32::MAX, DEVICE_READY),
        (0, PORT_READY),
        (0, PORT_OPEN),
        (2, PORT_READY),
        (u32::MAX, PORT_OPEN),
        (1, DEVICE_ADD),
        (1, 2),
        (1, 4),
        (1, 5),
        (1, 999),
    ] {
        guest.tell(id, event, 1);
    }
    guest.tell_bytes(&[]);
    guest.tell_bytes(&message(1, PORT_OPEN, 1)[..7]);
    settle();
    assert_eq!(guest.queues[2].used(), None);
    assert_eq!(guest.opens(), []);
    // Bytes after a message do not matter.
    guest.tell_bytes(&[message(1, PORT_OPEN, 1), vec![7; 100]].concat());
    assert_eq!(guest.opens(), [("port1".to_owned(), true)]);
}

#[test]
fn a_driver_that_resumes_goes_on_with_its_ports() {
    let mut guest = Guest::open(1);
    guest.connect();
    guest.opens();
    guest.tell(1, PORT_READY, 1);
    guest.tell(1, PORT_OPEN, 1);
    let name = [&message(1, PORT_NAME, 1)[..], b"port1"].concat();
    guest.expect(&[name, message(1, PORT_OPEN, 1)]);
    assert_eq!(guest.opens(), [("port1".to_owned(), true)]);
    // It has no need of them when it asks.
    guest.tell(u32::MAX, DEVICE_READY, 1);
    settle();
    assert_eq!(guest.queues[2].used(), None);
}

#[test]
fn a_driver_that_asks_again_and_does_not_read_gets_each_answer_once() {
    let mut guest = Guest::new(1);
    guest.tell(u32::MAX, DEVICE_READY, 1);
    guest.expect(&[message(1, DEVICE_ADD, 1)]);
    // A driver without buffers.
    let queues = guest.console.quiesce().unwrap();
    guest.queues[2].set_available(1);
    guest.activate(queues, MULTIPORT);
    for _ in 0..1000 {
        guest.tell(1, PORT_READY, 1);
    }
    guest.queues[2].set_available(SIZE + 1);
    guest.queues[2].kick();
    let name = [&message(1, PORT_NAME, 1)[..], b"port1"].concat();
    for expected in [name, message(1, PORT_OPEN, 1)] {
        let (head, len) = guest.queues[2].wait();
        assert_eq!(guest.get(buffer(2, head), len), expected);
    }
    settle();
    assert_eq!(guest.queues[2].used(), None);
}

#[test]
fn the_guest_learns_that_the_host_has_closed_its_end() {
    let mut guest = Guest::open(2);
    drop(guest.hosts.remove(0));
    guest.expect(&[message(1, PORT_OPEN, 0)]);
    // Also if nobody in the guest has the port open, and while it sends.
    guest.tell(2, PORT_OPEN, 0);
    drop(guest.hosts.remove(0));
    guest.expect(&[message(2, PORT_OPEN, 0)]);
    settle();
    assert_eq!(guest.queues[2].used(), None);
    // A driver that sets the port up again is not told that it is open.
    guest.tell(1, PORT_READY, 1);
    guest.expect(&[[&message(1, PORT_NAME, 1)[..], b"port1"].concat()]);
    settle();
    assert_eq!(guest.queues[2].used(), None);
}
