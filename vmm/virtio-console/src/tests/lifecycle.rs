//! Driver changes, pauses and parameters.

use std::io::Write;

use husk_devices::virtio::ActivateError;

use super::*;
use crate::{MAX_NAME_LEN, MAX_PORTS};

#[test]
fn a_new_driver_finds_the_ports_again() {
    let mut guest = Guest::open(2);
    for round in 0..10 {
        guest.transmit(1, &pattern(1000, round));
        assert!(guest.heard(1, 1000) == pattern(1000, round));
        guest.hosts[1].write_all(b"news").unwrap();
        assert_eq!(guest.next(6), b"news");
        guest.opens();
        guest.connect();
        assert_eq!(guest.opens(), [("port1".into(), false), ("port2".into(), false)]);
        guest.open_all();
    }
}

#[test]
fn bytes_that_the_old_driver_left_half_sent_do_not_matter_to_the_new_one() {
    let mut guest = Guest::open(1);
    let mut sent = 0;
    while {
        guest.transmit(1, &pattern(20_000, 0));
        sent += 20_000;
        settle();
        guest.queues[5].used().is_some()
    } {}
    guest.connect();
    guest.hosts[0].set_nonblocking(true).unwrap();
    let mut taken = 0;
    while let Ok(count) = guest.hosts[0].read(&mut [0; 4096]) {
        taken += count;
    }
    assert!(taken < sent);
    guest.hosts[0].set_nonblocking(false).unwrap();
    guest.open_all();
    guest.transmit(1, b"complete");
    assert_eq!(guest.heard(1, 8), b"complete");
}

#[test]
fn a_pause_keeps_the_state_of_the_ports() {
    let mut guest = Guest::open(1);
    guest.opens();
    for round in 0..20 {
        guest.hosts[0].write_all(&[round]).unwrap();
        guest.transmit(1, &[!round]);
        guest.pause();
        assert_eq!(guest.next(4), [round]);
        assert_eq!(guest.heard(1, 1), [!round]);
        guest.queues[5].wait();
    }
    assert_eq!(guest.opens(), []);
    // What happens during a pause is noticed after it.
    let queues = guest.console.quiesce().unwrap();
    assert_eq!(queues.len(), 6);
    assert!(guest.console.quiesce().is_none());
    drop(guest.hosts.remove(0));
    guest.activate(queues, MULTIPORT);
    guest.expect(&[message(1, PORT_OPEN, 0)]);
    assert_eq!(guest.queues[2].used(), None);
}

#[test]
fn the_control_queues_are_required() {
    let mut guest = Guest::new(1);
    for missing in [2, 3] {
        guest.console.reset();
        let queues = guest.queues.iter().map(|queue| queue.queue(false));
        let activation = Activation {
            mem: guest.mem.clone(),
            features: MULTIPORT,
            queues: queues.filter(|queue| queue.index != missing).collect(),
            interrupt: Arc::clone(&guest.interrupts) as _,
        };
        match guest.console.activate(activation) {
            Err(ActivateError::MissingQueue(index)) => assert_eq!(index, missing),
            other => panic!("{other:?}"),
        }
    }
    guest.connect();
    guest.open_all();
}

#[test]
fn unsuitable_parameters_are_refused() {
    let long = "x".repeat(MAX_NAME_LEN + 1);
    let many: Vec<_> = (0..=MAX_PORTS).map(|number| number.to_string()).collect();
    let cases: [(Vec<&str>, &str); 5] = [
        (vec![], "1 to 8 ports"),
        (many.iter().map(|name| &name[..]).collect(), "1 to 8 ports"),
        (vec![""], "1 to 128 bytes"),
        (vec![&long], "1 to 128 bytes"),
        (vec!["a", "b", "a"], "two ports \"a\""),
    ];
    for (names, reason) in cases {
        let port = |name: &&str| PortSetup {
            name: (*name).to_owned(),
            stream: UnixStream::pair().unwrap().0.into(),
        };
        let error = Console::new(names.iter().map(port).collect(), Arc::new(|_, _| {})).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
}
