//! A device that is saved, and continues in one that is built anew.

use std::thread::sleep;
use std::time::{Duration, Instant};

use husk_devices::component::testing::{mutate, mutation};
use husk_devices::component::{ComponentState, RestoreError};
use proptest::prelude::*;

use super::*;

impl Guest {
    /// Moves the driver to a device that is built anew.
    fn reload(&mut self) {
        let queues = self.net.quiesce().unwrap();
        let state = self.net.save().unwrap();
        let text = serde_json::to_string(&state).unwrap();
        let (mut net, handle) = over(&self.taps);
        net.restore(&serde_json::from_str(&text).unwrap(), self.features)
            .unwrap();
        assert_eq!(net.save().unwrap(), state);
        (self.net, self.handle) = (net, handle);
        self.activate(queues);
    }

    /// Waits until the device has passed or dropped the frame that was sent to it.
    fn settle(&mut self) {
        let deadline = Instant::now() + TIMEOUT;
        while rustix::io::ioctl_fionread(&self.taps[0]).unwrap() > 0 {
            assert!(Instant::now() < deadline, "the frame is not read");
            sleep(Duration::from_millis(1));
        }
        self.pause();
    }

    fn saved(&mut self) -> serde_json::Value {
        self.net.quiesce().unwrap();
        self.net.save().unwrap().into()
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// A frame to the guest.
    Receive {
        to: Mac,
        vlan: Option<u16>,
    },
    /// A frame of the guest.
    Transmit {
        seed: u8,
        kick: bool,
    },
    Command(Vec<u8>),
    Link(bool),
    Announce,
    Save,
}

const GROUP: Mac = [1, 0, 0x5e, 0, 0, 1];

fn step() -> impl Strategy<Value = Step> {
    let to = prop::sample::select(vec![MAC, PEER, GROUP, [0xff; 6]]);
    let vlan = prop::option::of(0..8_u16);
    let mode = (0..6_u8, 0..2_u8).prop_map(|(mode, on)| vec![0, mode, on]);
    let tables = (any::<bool>(), any::<bool>()).prop_map(|(unicast, multicast)| {
        let table = |on: bool, mac: &Mac| match on {
            true => [&[1, 0, 0, 0][..], mac].concat(),
            false => vec![0; 4],
        };
        [&[1, 0][..], &table(unicast, &PEER), &table(multicast, &GROUP)].concat()
    });
    let command = prop_oneof![
        4 => mode,
        2 => tables,
        1 => prop::sample::select(vec![MAC, PEER]).prop_map(|mac| [&[1, 1][..], &mac].concat()),
        2 => (0..2_u8, 0..8_u8).prop_map(|(off, id)| vec![2, off, id, 0]),
        1 => Just(vec![3, 0]),
        2 => (1..4_u8).prop_map(|pairs| vec![4, 0, pairs, 0]),
        1 => Just(vec![5, 0, 2, 0, 0, 0, 0, 0, 0, 0]),
    ];
    prop_oneof![
        4 => (to, vlan).prop_map(|(to, vlan)| Step::Receive { to, vlan }),
        2 => (any::<u8>(), any::<bool>()).prop_map(|(seed, kick)| Step::Transmit { seed, kick }),
        6 => command.prop_map(Step::Command),
        1 => any::<bool>().prop_map(Step::Link),
        1 => Just(Step::Announce),
        4 => Just(Step::Save),
    ]
}

/// Carries out the steps, and returns what the driver and the network saw.
fn run(steps: &[Step], save: bool) -> Vec<Vec<u8>> {
    let mut guest = Guest::with(2, ALL, 256);
    (0..2).for_each(|pair| guest.offer(pair, 120, 2048));
    guest.command(&[0, 0, 0]);
    let (mut seen, mut up) = (Vec::new(), true);
    let marker = with_header(&frame([0xff; 6], 60, 0xee));
    for step in steps {
        match step {
            Step::Receive { to, vlan } if up => {
                let mut bytes = frame(*to, 60, 1);
                if let Some(id) = vlan {
                    bytes[12..16].copy_from_slice(&[0x81, 0, 0, *id as u8]);
                }
                guest.peers[0].send(&with_header(&bytes)).unwrap();
                if save && seen.len() % 2 == 0 {
                    guest.reload();
                }
                guest.settle();
                // All broadcasts arrive while the driver opens the filter: the end of what the frame caused.
                guest.command(&[0, 5, 0]);
                guest.peers[0].send(&marker).unwrap();
                loop {
                    let received = guest.received(0);
                    guest.offer(0, 1, 2048);
                    if received[12..] == marker[12..] {
                        break;
                    }
                    seen.push(received);
                }
            }
            Step::Transmit { seed, kick } if up => {
                let bytes = with_header(&frame(PEER, 100, *seed));
                guest.transmit(0, &bytes, 50);
                if *kick {
                    guest.transmit[0].kick();
                }
                if save {
                    guest.reload();
                }
                guest.transmit[0].kick();
                guest.transmit[0].wait();
                seen.push(guest.out(0));
            }
            Step::Receive { .. } | Step::Transmit { .. } => {}
            Step::Command(bytes) => seen.push(vec![guest.command(bytes)]),
            Step::Link(on) => {
                // A link that comes up drops what arrived before; the test sends nothing meanwhile.
                if *on && !up {
                    guest.handle.set_link(true);
                    guest.pause();
                } else if !*on && up {
                    guest.handle.set_link(false);
                }
                up = *on;
            }
            Step::Announce => seen.push(vec![guest.handle.announce().into()]),
            Step::Save if save => guest.reload(),
            Step::Save => {}
        }
        seen.push(guest.config().to_vec());
        seen.push(guest.handle.mac().to_vec());
    }
    assert_eq!(guest.interrupts.reset(), None);
    let state = serde_json::to_vec(&guest.saved()).unwrap();
    seen.push(state);
    seen
}

#[test]
fn rules_of_the_driver_and_the_link_are_kept() {
    let mut guest = Guest::with(2, ALL, 256);
    for command in [
        &[0, 0, 0][..],
        &[0, 4, 1],
        &[2, 0, 7, 0],
        &[4, 0, 2, 0],
        &[1, 1, 2, 0, 0, 0, 0, 9],
        &[5, 0, 2, 0, 0, 0, 0, 0, 0, 0],
    ] {
        assert_eq!(guest.command(command), 0, "{command:?}");
    }
    assert!(guest.handle.announce());
    guest.handle.set_link(false);
    guest.reload();
    assert_eq!(guest.config()[..8], [2, 0, 0, 0, 0, 9, 2, 0]);
    let state = guest.saved();
    let driver = &state["driver"];
    assert_eq!((&driver["pairs"], &driver["offloads"]), (&2.into(), &2.into()));
    assert_eq!((&driver["modes"], &state["link"]), (&0x10.into(), &false.into()));
}

#[test]
fn a_link_that_the_host_took_down_stays_down() {
    let mut guest = Guest::with(1, ALL, 64);
    let queues = guest.net.quiesce().unwrap();
    let state = guest.net.save().unwrap();
    (guest.net, guest.handle) = over(&guest.taps);
    guest.handle.set_link(false);
    guest.net.restore(&state, ALL).unwrap();
    assert!(!guest.handle.link());
    guest.activate(queues);
    guest.transmit(0, &with_header(&frame(PEER, 100, 1)), 50);
    guest.transmit[0].kick();
    guest.transmit[0].wait();
    let mut buffer = [0; 256];
    guest.peers[0].set_nonblocking(true).unwrap();
    assert!(guest.peers[0].recv(&mut buffer).is_err(), "no frame leaves");
}

#[test]
fn what_the_device_cannot_have_is_refused() {
    let mut guest = Guest::with(2, ALL, 256);
    let good = guest.saved();
    let refuse = |pointer: &str, value: serde_json::Value| {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value;
        match over(&guest.taps).0.restore(&bad.into(), ALL) {
            Err(RestoreError::Field { field, .. }) => {
                assert!(field.ends_with(&pointer.replace('/', ".")[1..]))
            }
            got => panic!("{pointer}: {got:?}"),
        }
    };
    refuse("/mac", serde_json::json!([1, 0, 0, 0, 0, 0]));
    refuse("/driver/pairs", 3.into());
    refuse("/driver/pairs", 0.into());
    refuse("/driver/offloads", (1_u64 << 63).into());
    refuse("/driver/modes", 64.into());
    refuse("/driver/vlans", serde_json::Value::Null);
    refuse("/driver/vlans", "".into());
    let many = serde_json::json!({ "addresses": vec![MAC; 65], "overflow": false });
    refuse("/driver/unicast", many.clone());
    refuse("/driver/multicast", many);
    assert!(
        over(&guest.taps)
            .0
            .restore(&good.into(), ALL & !(1 << 19))
            .is_err(),
        "no VLANs"
    );
}

#[test]
fn pairs_that_the_driver_has_not_set_up_are_noticed() {
    let mut guest = Guest::with(2, ALL, 256);
    let mut queues = guest.net.quiesce().unwrap();
    let mut state: serde_json::Value = guest.net.save().unwrap().into();
    state["driver"]["pairs"] = 2.into();
    let (mut net, _) = over(&guest.taps);
    net.restore(&state.into(), ALL).unwrap();
    queues.retain(|queue| queue.index != 2);
    let activation = Activation {
        mem: guest.mem.clone(),
        features: ALL,
        queues,
        interrupt: Arc::clone(&guest.interrupts) as _,
    };
    assert!(net.activate(activation).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]

    /// Driver and network see the same, whether or not the device is saved and built anew in between.
    #[test]
    fn a_restored_device_continues(steps in prop::collection::vec(step(), 1..30)) {
        let (plain, saved) = (run(&steps, false), run(&steps, true));
        prop_assert_eq!(plain, saved);
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(changes in prop::collection::vec(mutation(), 1..4)) {
        let mut guest = Guest::with(2, ALL, 64);
        let queues = guest.net.quiesce().unwrap();
        let mut state: ComponentState = guest.net.save().unwrap();
        changes.iter().for_each(|(place, change)| mutate(&mut state, *place, change));
        let (mut net, handle) = over(&guest.taps);
        let before = net.save().unwrap();
        if net.restore(&state, ALL).is_err() {
            prop_assert_eq!(net.save().unwrap(), before);
        }
        (guest.net, guest.handle) = (net, handle);
        guest.activate(queues);
        guest.offer(0, 2, 2048);
        guest.peers[0].send(&with_header(&frame(MAC, 60, 1))).unwrap();
        guest.command(&[0, 0, 1]);
        prop_assert!(guest.net.quiesce().is_some_and(|queues| queues.len() == 5));
        prop_assert_eq!(guest.interrupts.reset(), None);
    }
}
