//! A device that is saved: its connections end, and the driver learns it.

use husk_devices::component::testing::{mutate, mutation};
use proptest::prelude::*;

use super::*;

const EVENTS: u64 = 0x8_0000;

impl Guest {
    /// Moves the driver to a device that is built anew.
    fn reload(&mut self) {
        let queues = self.vsock.quiesce().unwrap();
        let state = self.vsock.save().unwrap();
        let told = Arc::clone(&self.requests);
        let on_request = move |id, port| {
            told.lock().unwrap().push((id, port));
            true
        };
        let (mut vsock, handle) = Vsock::new(CID as u32, Arc::new(on_request)).unwrap();
        let text = serde_json::to_string(&state).unwrap();
        vsock
            .restore(&serde_json::from_str(&text).unwrap(), FEATURES)
            .unwrap();
        assert_eq!(vsock.save().unwrap(), state);
        (self.vsock, self.handle) = (vsock, handle);
        self.activate(queues);
    }

    /// Offers a buffer for an event.
    fn offer_event(&mut self) {
        let at = EVENTS + 16 * u64::from(self.queues[2].next_head());
        self.mem
            .memory()
            .write_slice(&[0xff; 16], GuestAddress(at))
            .unwrap();
        self.queues[2].add(&[(at, 4, WRITE)]);
        self.queues[2].kick();
    }

    /// The next event.
    fn event(&mut self) -> u32 {
        let (head, len) = self.queues[2].wait();
        assert_eq!(len, 4);
        let at = EVENTS + 16 * u64::from(head);
        self.mem.memory().read_obj(GuestAddress(at)).unwrap()
    }
}

#[test]
fn connections_end_and_the_driver_is_told_once() {
    let mut guest = Guest::new();
    (0..2).for_each(|_| guest.offer_event());
    let mut host = guest.connect(1024, 5000);
    assert_eq!(guest.queues[2].used(), None);
    guest.reload();
    assert_eq!(heard_all(&mut host), b"");
    assert_eq!(guest.event(), 0, "VIRTIO_VSOCK_EVENT_TRANSPORT_RESET");
    guest.send_bytes(1024, 5000, b"late");
    guest.expect(1024, 5000, RST);
    let (mut other, port) = guest.accept(22);
    guest.send_bytes(22, port, b"new");
    assert_eq!(heard(&mut other, 3), b"new");
    let queues = guest.vsock.quiesce().unwrap();
    guest.activate(queues);
    guest.send_bytes(22, port, b"goes on");
    assert_eq!(heard(&mut other, 7), b"goes on");
    assert_eq!(guest.queues[2].used(), None);
}

#[test]
fn a_driver_without_a_buffer_is_told_later() {
    let mut guest = Guest::new();
    let _host = guest.connect(1024, 5000);
    guest.reload();
    guest.expect_nothing();
    guest.reload();
    guest.offer_event();
    assert_eq!(guest.event(), 0);
    guest.offer_event();
    guest.expect_nothing();
    assert_eq!(guest.queues[2].used(), None);
}

#[test]
fn a_new_driver_is_not_told_what_the_old_one_lost() {
    let mut guest = Guest::new();
    let _host = guest.connect(1024, 5000);
    guest.reload();
    guest.start();
    guest.offer_event();
    let _other = guest.connect(1025, 5001);
    assert_eq!(guest.queues[2].used(), None);
    guest.vsock.reset();
    let state: serde_json::Value = guest.vsock.save().unwrap().into();
    assert_eq!(
        state,
        serde_json::json!({ "active": false, "next_host_port": 1 << 30 })
    );
}

/// The guest's sockets of the time before may not be gone when a new connection comes.
#[test]
fn a_restored_device_gives_no_port_of_the_host_again() {
    let mut guest = Guest::new();
    let (_host, before) = guest.accept(22);
    guest.reload();
    // Saved again before a connection.
    guest.reload();
    let (_host, after) = guest.accept(22);
    assert_eq!(after, before + 1);
}

#[test]
fn a_state_without_a_port_is_read_and_one_with_a_wrong_port_refused() {
    let mut guest = Guest::new();
    let mut restore = |state: serde_json::Value| guest.vsock.restore(&state.into(), FEATURES);
    restore(serde_json::json!({ "active": true })).unwrap();
    for port in [0, (1 << 30) - 1, 1_u32 << 31, u32::MAX] {
        let refused = restore(serde_json::json!({ "active": true, "next_host_port": port }));
        assert!(
            refused.unwrap_err().to_string().contains("next_host_port"),
            "{port}"
        );
    }
}

#[test]
fn a_buffer_that_is_too_small_for_an_event_breaks_the_device() {
    let mut guest = Guest::new();
    let _host = guest.connect(1024, 5000);
    guest.queues[2].add(&[(EVENTS, 3, WRITE)]);
    guest.reload();
    assert!(guest.broken().starts_with("event queue: "));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..Default::default() })]

    /// Whenever the device is saved, connections that begin afterwards work.
    #[test]
    fn a_restored_device_continues(steps in prop::collection::vec((any::<bool>(), 1..2000_usize), 1..12)) {
        let mut guest = Guest::new();
        let (mut conversation, mut saves) = (None, 0);
        for (port, (save, len)) in (2000..).zip(steps) {
            if save {
                guest.reload();
                conversation = None;
                saves += 1;
                guest.offer_event();
                prop_assert_eq!(guest.event(), 0);
            }
            let (host, at) = conversation.get_or_insert_with(|| (guest.connect(port, 5000), port));
            let bytes = pattern(len, port as u8);
            guest.send_bytes(*at, 5000, &bytes);
            prop_assert_eq!(heard(host, len), bytes);
        }
        prop_assert_eq!(guest.queues[2].used(), None, "{} saves", saves);
        prop_assert_eq!(guest.interrupts.reset(), None);
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(changes in prop::collection::vec(mutation(), 1..3)) {
        let mut guest = Guest::new();
        let queues = guest.vsock.quiesce().unwrap();
        let mut state = guest.vsock.save().unwrap();
        changes.iter().for_each(|(place, change)| mutate(&mut state, *place, change));
        let _ = guest.vsock.restore(&state, FEATURES);
        guest.activate(queues);
        guest.connect(1024, 5000);
    }
}
