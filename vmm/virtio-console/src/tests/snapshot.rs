//! A device that is saved, and continues in one that is built anew.

use std::io::Write;

use husk_devices::component::testing::{mutate, mutation};
use proptest::prelude::*;

use super::*;

impl Guest {
    /// A device with the same ports over the streams that the old one has.
    fn twin(&self) -> Console {
        let told = Arc::clone(&self.opens);
        let on_guest_open = move |name: &str, open| told.lock().unwrap().push((name.to_owned(), open));
        let port = |(name, file): &(String, Arc<std::fs::File>)| PortSetup {
            name: name.clone(),
            stream: file.try_clone().unwrap().into(),
        };
        let ports = self.console.sockets.iter().map(port).collect();
        Console::new(ports, Arc::new(on_guest_open)).unwrap()
    }

    /// Moves the driver to a device that is built anew.
    fn reload(&mut self) {
        let queues = self.console.quiesce().unwrap();
        let state = self.console.save().unwrap();
        let text = serde_json::to_string(&state).unwrap();
        let mut twin = self.twin();
        twin.restore(&serde_json::from_str(&text).unwrap(), MULTIPORT)
            .unwrap();
        assert_eq!(twin.save().unwrap(), state);
        self.console = twin;
        self.activate(queues, MULTIPORT);
    }
}

#[test]
fn the_host_is_told_what_the_guest_has_open() {
    let mut guest = Guest::open(2);
    guest.tell(2, PORT_OPEN, 0);
    guest.opens();
    guest.reload();
    assert_eq!(guest.opens(), [("port1".into(), true), ("port2".into(), false)]);
}

#[test]
fn a_buffer_that_was_sent_in_part_is_sent_once() {
    let mut guest = Guest::open(1);
    let mut sent = Vec::new();
    while {
        let bytes = pattern(20_000, sent.len() as u8);
        guest.transmit(1, &bytes);
        sent.extend(bytes);
        settle();
        guest.queues[5].used().is_some()
    } {}
    let queues = guest.console.quiesce().unwrap();
    let state: serde_json::Value = guest.console.save().unwrap().into();
    assert_ne!(state["ports"][1]["taken"], 0);
    guest.activate(queues, MULTIPORT);
    guest.reload();
    let heard = guest.heard(1, sent.len());
    assert!(heard == sent);
}

#[test]
fn the_guest_learns_that_a_new_host_is_there() {
    let mut guest = Guest::open(1);
    drop(guest.hosts.remove(0));
    guest.expect(&[message(1, PORT_OPEN, 0)]);
    let queues = guest.console.quiesce().unwrap();
    let state = guest.console.save().unwrap();
    let (host, stream) = UnixStream::pair().unwrap();
    let port = PortSetup {
        name: "port1".into(),
        stream: stream.into(),
    };
    guest.hosts.push(host);
    guest.console = Console::new(vec![port], Arc::new(|_, _| {})).unwrap();
    guest.console.restore(&state, MULTIPORT).unwrap();
    guest.activate(queues, MULTIPORT);
    guest.expect(&[message(1, PORT_OPEN, 1)]);
    guest.hosts[0].write_all(b"hello").unwrap();
    assert_eq!(guest.next(4), b"hello");
}

#[test]
fn other_ports_are_refused() {
    let mut guest = Guest::open(2);
    guest.console.quiesce().unwrap();
    let good: serde_json::Value = guest.console.save().unwrap().into();
    let refuse = |pointer: &str, value: serde_json::Value| {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        assert!(guest.twin().restore(&bad.into(), MULTIPORT).is_err(), "{pointer}");
    };
    refuse("/names/0", "other".into());
    refuse("/names", serde_json::json!(["port1"]));
    refuse("/ports", serde_json::json!([]));
    refuse("/ports/0/control/add", true.into());
    refuse("/ports/0/guest_open", true.into());
    refuse("/ports/1/control/known", false.into());
    refuse("/ports/1/taken", (1_u64 << 32).into());
}

#[derive(Clone, Debug)]
enum Step {
    Tell(u32, u16, u16),
    Transmit(usize, u16),
    Host(usize, u16),
    Save,
}

fn step() -> impl Strategy<Value = Step> {
    let port = 1..3_usize;
    prop_oneof![
        2 => (1..3_u32, prop::sample::select(vec![PORT_READY, PORT_OPEN]), 0..2_u16)
            .prop_map(|(id, event, value)| Step::Tell(id, event, value)),
        3 => (port.clone(), 1..3000_u16).prop_map(|(port, len)| Step::Transmit(port, len)),
        3 => (port, 1..2000_u16).prop_map(|(port, len)| Step::Host(port, len)),
        3 => Just(Step::Save),
    ]
}

/// Carries out the steps, and returns what the driver and the host saw.
fn run(steps: &[Step], save: bool) -> Vec<Vec<u8>> {
    let mut guest = Guest::open(2);
    let mut seen = Vec::new();
    let (mut open, mut waiting) = ([true; 2], [0; 2]);
    for (seed, step) in (0..).zip(steps) {
        match step {
            Step::Tell(id, event, value) => {
                guest.tell(*id, *event, *value);
                if *event == PORT_OPEN {
                    open[*id as usize - 1] = *value == 1;
                } else if *value == 1 {
                    if save {
                        guest.reload();
                    }
                    seen.push(guest.told());
                    seen.push(guest.told());
                }
            }
            Step::Transmit(port, len) => {
                let bytes = pattern((*len).into(), seed);
                guest.transmit(*port, &bytes);
                if save {
                    guest.reload();
                }
                seen.push(guest.heard(*port, bytes.len()));
                guest.queues[3 + 2 * port].wait();
            }
            Step::Host(port, len) => {
                guest.hosts[port - 1]
                    .write_all(&pattern((*len).into(), seed))
                    .unwrap();
                waiting[port - 1] += usize::from(*len);
            }
            Step::Save if save => guest.reload(),
            Step::Save => {}
        }
        for port in (0..2).filter(|port| open[*port]) {
            let mut heard = Vec::new();
            while heard.len() < waiting[port] {
                heard.extend(guest.next(4 + 2 * port as u16));
            }
            waiting[port] = 0;
            seen.push(heard);
        }
    }
    assert_eq!(guest.interrupts.reset(), None);
    guest.console.quiesce().unwrap();
    seen.push(serde_json::to_vec(&guest.console.save().unwrap()).unwrap());
    seen
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() })]

    /// Driver and host see the same, whether or not the device is saved and built anew in between.
    #[test]
    fn a_restored_device_continues(steps in prop::collection::vec(step(), 1..30)) {
        let (plain, saved) = (run(&steps, false), run(&steps, true));
        prop_assert!(plain == saved);
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(changes in prop::collection::vec(mutation(), 1..4)) {
        let mut guest = Guest::open(2);
        let queues = guest.console.quiesce().unwrap();
        let mut state = guest.console.save().unwrap();
        changes.iter().for_each(|(place, change)| mutate(&mut state, *place, change));
        let mut twin = guest.twin();
        let before = twin.save().unwrap();
        if twin.restore(&state, MULTIPORT).is_err() {
            prop_assert_eq!(twin.save().unwrap(), before);
        }
        guest.console = twin;
        guest.activate(queues, MULTIPORT);
        guest.transmit(1, b"some bytes");
        guest.tell(1, PORT_READY, 1);
        prop_assert!(guest.console.quiesce().is_some());
        prop_assert_eq!(guest.interrupts.reset(), None);
    }
}
