//! Drivers that break the rules: they harm their own device, and nothing else.

use std::io::Write;
use std::time::Instant;

use husk_devices::virtio::testing::NEXT;
use proptest::prelude::*;

use super::*;

#[test]
fn a_broken_ring_sets_device_needs_reset() {
    type Act = fn(&mut Guest);
    let acts: [(&str, Act); 9] = [
        ("control transmit queue: ", |guest| {
            guest.queues[3].put(0, (SENT, 100, NEXT), 0);
            guest.queues[3].offer(0);
        }),
        ("control transmit queue: ", |guest| {
            guest.queues[3].add(&[(END as u64 - 4, 100, 0)]);
        }),
        ("control transmit queue: ", |guest| {
            guest.queues[3].set_available(1000);
        }),
        ("queue 5: ", |guest| {
            guest.queues[5].offer(5000);
        }),
        ("queue 5: ", |guest| {
            guest.queues[5].add(&[(u64::MAX - 10, 100, 0)]);
        }),
        ("queue 5: ", |guest| {
            guest.queues[5].add(&[(SENT, 8, WRITE), (SENT, 8, 0)]);
        }),
        ("queue 6: ", |guest| {
            guest.queues[6].set_available(1000);
            guest.hosts[1].write_all(b"x").unwrap();
        }),
        ("control receive queue: ", |guest| {
            guest.queues[2].set_available(2000);
            guest.queues[2].kick();
            guest.tell(1, PORT_READY, 1);
        }),
        ("control receive queue: buffer with less", |guest| {
            let queues = guest.console.quiesce().unwrap();
            for head in 0..SIZE {
                guest.queues[2].put(head, (BUFFERS, 12, WRITE), 0);
            }
            guest.activate(queues, MULTIPORT);
            guest.tell(1, PORT_READY, 1);
        }),
    ];
    let mut guest = Guest::new(2);
    for (reason, act) in acts {
        guest.connect();
        guest.open_all();
        guest.opens();
        act(&mut guest);
        guest.queues.iter().for_each(Driver::kick);
        let said = guest.broken();
        assert!(said.starts_with(reason), "{said}");
        wait_for("closed ports", || (guest.opens().len() == 2).then_some(()));
    }
    // A new driver can use all of it.
    guest.hosts[1].set_nonblocking(true).unwrap();
    guest.connect();
    guest.open_all();
    guest.transmit(2, b"fine");
    guest.hosts[1].set_nonblocking(false).unwrap();
    assert_eq!(guest.heard(2, 4), b"fine");
}

#[test]
fn a_receive_buffer_without_space_loses_no_bytes() {
    let mut guest = Guest::new(1);
    guest.tell(u32::MAX, DEVICE_READY, 1);
    guest.expect(&[message(1, DEVICE_ADD, 1)]);
    guest.queues[4].add(&[(BUFFERS, 0, WRITE)]);
    guest.hosts[0].write_all(b"kept").unwrap();
    guest.tell(1, PORT_OPEN, 1);
    assert_eq!(guest.broken(), "queue 4: receive buffer without space");
    guest.connect();
    guest.open_all();
    assert_eq!(guest.next(4), b"kept");
}

#[test]
fn a_flood_of_openings_is_slowed_down_and_can_be_stopped() {
    let mut guest = Guest::open(2);
    let start = Instant::now();
    for round in 0..160 {
        guest.tell(1, PORT_OPEN, round % 2);
    }
    assert!(start.elapsed() > Duration::from_millis(100));
    // Nothing else waits for it.
    guest.put(MESSAGES, &message(1, PORT_OPEN, 0));
    guest.put(MESSAGES + 8, &message(1, PORT_OPEN, 1));
    for round in 0..u64::from(SIZE) {
        guest.queues[3].add(&[(MESSAGES + round % 2 * 8, 8, 0)]);
    }
    guest.queues[3].kick();
    guest.transmit(2, b"in time");
    assert_eq!(guest.heard(2, 7), b"in time");
    guest.console.reset();
}

#[test]
fn a_buffer_without_end_keeps_no_port_waiting() {
    let mut guest = Guest::open(2);
    let mut host = guest.hosts[0].try_clone().unwrap();
    let reader = thread::spawn(move || {
        let mut bytes = [0; 0x1_0000];
        while host.read(&mut bytes).is_ok_and(|count| count > 0) {}
    });
    // All of memory, again and again.
    let all: Vec<_> = (0..SIZE).map(|_| (0, END as u32, 0)).collect();
    guest.queues[5].add(&all);
    guest.queues[5].kick();
    guest.transmit(2, b"in time");
    assert_eq!(guest.heard(2, 7), b"in time");
    guest.console.reset();
    drop(guest);
    reader.join().unwrap();
}

/// An act of a random guest or host.
#[derive(Clone, Debug)]
enum Act {
    Put(u16, u16, (u8, u32, u8), u16),
    Offer(u16, u16),
    Available(u16, u16),
    Message(u32, u16, u16),
    Kick(u16),
    HostSends,
    HostCloses,
    Pause,
    Connect,
    OpenAll,
}

fn act() -> impl Strategy<Value = Act> {
    let queue = || 0..6_u16;
    prop_oneof![
        6 => (queue(), 0..20_u16, (0..5_u8, 0..0x3000_u32, 0..8_u8), 0..20_u16)
            .prop_map(|(queue, at, descriptor, next)| Act::Put(queue, at % SIZE, descriptor, next)),
        8 => (queue(), 0..18_u16).prop_map(|(queue, head)| Act::Offer(queue, head)),
        1 => (queue(), any::<u16>()).prop_map(|(queue, index)| Act::Available(queue, index)),
        6 => (0..4_u32, 0..9_u16, 0..3_u16).prop_map(|(id, event, value)| Act::Message(id, event, value)),
        4 => queue().prop_map(Act::Kick),
        3 => Just(Act::HostSends),
        1 => Just(Act::HostCloses),
        1 => Just(Act::Pause),
        2 => Just(Act::Connect),
        2 => Just(Act::OpenAll),
    ]
}

impl Guest {
    /// Stops the device. Only a worker that panicked keeps the queues.
    fn stop(&mut self) -> Vec<ActiveQueue> {
        self.console.quiesce().expect("no panic")
    }

    fn act(&mut self, act: Act) {
        const PLACES: [u64; 5] = [MESSAGES, BUFFERS, SENT, 0x1_0000, END as u64 - 100];
        let queue = |queue: u16| usize::from(queue);
        match act {
            Act::Put(index, at, (place, len, flags), next) => {
                let descriptor = (PLACES[usize::from(place)], len, u16::from(flags));
                self.queues[queue(index)].put(at, descriptor, next);
            }
            Act::Offer(index, head) => {
                self.queues[queue(index)].offer(head);
                self.queues[queue(index)].kick();
            }
            Act::Available(index, available) => self.queues[queue(index)].set_available(available),
            Act::Message(id, event, value) => {
                self.put(MESSAGES, &message(id, event, value));
                self.queues[3].add(&[(MESSAGES, 8, 0)]);
                self.queues[3].kick();
            }
            Act::Kick(index) => self.queues[queue(index)].kick(),
            Act::HostSends => {
                for host in &mut self.hosts {
                    let _ = host.write(&[7; 700]);
                }
            }
            Act::HostCloses => self.hosts.clear(),
            Act::Pause => {
                let queues = self.stop();
                self.activate(queues, MULTIPORT);
            }
            Act::Connect => {
                self.stop();
                self.connect();
            }
            Act::OpenAll => {
                self.stop();
                self.connect();
                if !self.hosts.is_empty() {
                    self.open_all();
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Whatever the guest does, the worker does not panic, the device stops on request, and a next driver can use it.
    #[test]
    fn no_guest_harms_more_than_its_device(acts in prop::collection::vec(act(), 0..60)) {
        let mut guest = Guest::new(1);
        guest.hosts[0].set_nonblocking(true).unwrap();
        for act in acts {
            guest.act(act);
        }
        prop_assert_eq!(guest.stop().len(), 6);
        // All that the device keeps between passes.
        let kept = format!("{:?}", guest.console.ports);
        prop_assert!(kept.len() < 1000, "{}", kept);
        for host in &mut guest.hosts {
            while host.read(&mut [0; 0x1_0000]).is_ok_and(|count| count > 0) {}
        }
        guest.connect();
        prop_assert_eq!(guest.interrupts.reset(), None);
        guest.tell(u32::MAX, DEVICE_READY, 1);
        guest.expect(&[message(1, DEVICE_ADD, 1)]);
        guest.transmit(1, b"here");
        guest.queues[5].wait();
        prop_assert_eq!(guest.stop().len(), 6);
    }
}
