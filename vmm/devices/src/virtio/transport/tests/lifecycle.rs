//! Activation, failure, reset, pause and restore; sections are of the virtio 1.2 specification.

use virtio_queue::QueueT;

use super::fake::{self, FEATURES, Fail, MEMORY, Machine, VERSION_1, WINDOW, machine};
use crate::component::{Component, RestoreError, SaveError};
use crate::virtio::transport::*;

#[test]
fn the_device_gets_the_enabled_queues_when_the_driver_is_ready() {
    let (m, device) = machine();
    m.start();
    assert_eq!(m.status(), 0xf);
    let journal = device.journal();
    assert_eq!(journal.features, FEATURES | VERSION_1);
    let queues = journal.queues.as_ref().unwrap();
    let shape: Vec<_> = queues
        .iter()
        .map(|q| (q.index, q.queue.size(), q.queue.used_ring()))
        .collect();
    assert_eq!(shape, [(0, 16, 0x3000), (2, 8, 0x6000)]);
    for active in queues {
        assert!(active.queue.event_idx_enabled());
        assert_eq!(
            active.kick.read().unwrap(),
            1,
            "looks at its ring once without being told"
        );
    }
}

#[test]
fn queues_are_fixed_while_the_driver_is_ready() {
    let (m, device) = machine();
    m.start();
    m.queue(1, 16, [0x7000, 0x8000, 0x9000]);
    m.ready();
    assert_eq!(m.word(0x1c), 0);
    assert_eq!(device.journal().activations, 1);
}

#[test]
fn rings_outside_memory_are_never_given_to_the_device() {
    let edge = MEMORY - 16 * 16;
    for rings in [
        [MEMORY, 0x2000, 0x3000],
        [edge + 16, 0x2000, 0x3000],
        [0x1000, MEMORY - 2, 0x3000],
        [0x1000, 0x2000, u64::MAX - 3],
        [!15, 0x2000, 0x3000],
        [0x1008, 0x2000, 0x3000],
        [0x1000, 0x2001, 0x3000],
        [0x1000, 0x2000, 0x3002],
    ] {
        let (m, device) = machine();
        m.enable();
        m.enable_vectors();
        m.write(0x10, &3_u16.to_le_bytes());
        assert!(m.negotiate(VERSION_1));
        m.queue(0, 16, rings);
        m.ready();
        assert_eq!(m.status(), 0x4f, "{rings:x?}");
        assert_eq!(
            m.msi.line(3).fired(),
            1,
            "section 2.1.2: a configuration change tells of it"
        );
        assert_eq!(
            (device.journal().activations, m.ioeventfds.addresses()),
            (0, vec![])
        );
    }
    let (m, device) = machine();
    m.enable();
    assert!(m.negotiate(VERSION_1));
    m.queue(0, 16, [edge, 0x2000, 0x3000]);
    m.ready();
    assert_eq!(
        (m.status(), device.journal().activations),
        (0xf, 1),
        "up to the last byte is inside"
    );
}

#[test]
fn a_device_that_fails_needs_a_reset_and_works_after_it() {
    for fail in [Fail::Activate, Fail::PanicInActivate] {
        let (m, device) = machine();
        device.journal().fail = Some(fail);
        m.start();
        assert_eq!(m.status(), 0x4f, "{fail:?}");
        assert_eq!((m.msi.line(3).fired(), m.ioeventfds.addresses()), (1, vec![]));
        m.write(0x14, &[0]);
        assert_eq!(m.status(), 0);
        device.journal().fail = None;
        m.start();
        assert_eq!(m.status(), 0xf);
    }
}

#[test]
fn panics_stay_in_the_device() {
    let (m, device) = machine();
    m.start();
    device.journal().fail = Some(Fail::PanicInRead);
    assert_eq!(m.read::<4>(0x800), [0; 4]);
    assert_eq!(m.status(), 0x4f);
    device.journal().fail = Some(Fail::PanicInReset);
    m.write(0x14, &[0]);
    assert_eq!(m.status(), 0, "a driver waits for this");
    m.start();
    assert_eq!(m.status(), 0x4f, "the device was not reset");
    device.journal().fail = None;
    m.write(0x14, &[0]);
    m.start();
    assert_eq!(m.status(), 0xf);
}

#[test]
fn a_driver_can_start_and_stop() {
    let (m, device) = machine();
    for round in 1..4 {
        m.start();
        assert_eq!(device.journal().activations, round);
        m.write(0x16, &0_u16.to_le_bytes());
        m.write(0x14, &[0]);
        // Section 2.4 and 4.1.4.3.1: all registers as new.
        assert_eq!((m.word(0x18), m.word(0x1a), m.word(0x1c)), (16, NO_VECTOR, 0));
        assert_eq!((m.word(0x10), m.status(), m.dword(0x20)), (NO_VECTOR, 0, 0));
        assert!(device.journal().queues.is_none() && m.ioeventfds.addresses().is_empty());
    }
}

#[test]
fn a_function_without_bus_mastering_is_inactive() {
    // Linux clears the bit when it leaves for another kernel (kexec), which must find its memory untouched.
    let (m, device) = machine();
    m.start();
    device.journal().queues.as_mut().unwrap()[1]
        .queue
        .set_next_avail(5);
    m.set_config(4, &[2]);
    assert!(device.journal().queues.is_none());
    assert_eq!(m.status(), 0xf);
    m.set_config(4, &[6]);
    let journal = device.journal();
    let queues = journal.queues.as_ref().unwrap();
    assert_eq!((journal.activations, queues[1].queue.next_avail()), (2, 5));
}

#[test]
fn pause_takes_the_queues_and_resume_gives_them_back() {
    let (m, device) = machine();
    m.start();
    let interrupt = {
        let mut journal = device.journal();
        let queue = &mut journal.queues.as_mut().unwrap()[0].queue;
        queue.set_next_avail(7);
        queue.set_next_used(6);
        journal.interrupt.clone().unwrap()
    };
    m.pci.pause();
    m.pci.pause();
    assert!(device.journal().queues.is_none());
    assert!(
        m.ioeventfds.ring(WINDOW + 0x1000),
        "a notification on the way is kept"
    );
    let generation = m.read::<1>(0x15);
    interrupt.signal_config();
    m.pci.resume();
    assert_ne!(
        m.read::<1>(0x15),
        generation,
        "configuration may have changed meanwhile"
    );
    assert_eq!((m.msi.line(3).fired(), m.status()), (1, 0xf));
    m.pci.resume();
    let journal = device.journal();
    let active = &journal.queues.as_ref().unwrap()[0];
    assert_eq!((active.queue.next_avail(), active.queue.next_used()), (7, 6));
    assert!(active.queue.event_idx_enabled() && active.kick.read().is_ok());
    assert_eq!(journal.activations, 2);
}

#[test]
fn a_reboot_ends_a_pause() {
    let (m, device) = machine();
    m.start();
    m.pci.pause();
    m.reboot();
    m.start();
    assert_eq!((m.status(), device.journal().activations), (0xf, 2));
    m.pci.resume();
    assert_eq!(
        (m.status(), device.journal().activations),
        (0xf, 2),
        "nothing of the old guest comes back"
    );
}

#[test]
fn a_driver_that_gets_ready_while_paused_is_served_after_it() {
    let (m, device) = machine();
    m.pci.pause();
    m.start();
    assert_eq!((m.status(), device.journal().activations), (0xf, 0));
    m.pci.resume();
    assert_eq!(device.journal().activations, 1);
}

#[test]
fn a_saved_state_continues_in_another_function() {
    let (m, device) = machine();
    m.start();
    m.write(0x802, &[7]);
    device.journal().queues.as_mut().unwrap()[1]
        .queue
        .set_next_avail(9);
    assert!(matches!(m.pci.save(), Err(SaveError::Running)));
    let state = m.save();
    let text = serde_json::to_string(&m.pci.save().unwrap()).unwrap();

    let (other, twin) = machine();
    Component::restore(&*other.pci, &serde_json::from_str(&text).unwrap()).unwrap();
    other.root.refresh();
    let message = other.msi.line(2).routed().unwrap().data;
    assert_eq!((other.status(), other.word(0x10), message), (0xf, 3, 2));
    assert!(twin.journal().queues.is_none(), "it stays paused");
    let mut again = other.save();
    again.generation = state.generation;
    assert_eq!(again, state);
    assert_eq!(other.ioeventfds.addresses(), [WINDOW + 0x1000, WINDOW + 0x1008]);
    let fired = || [0, 1, 2, 3].map(|line| other.msi.line(line).fired());
    assert_eq!(fired(), [0; 4]);
    other.pci.resume();
    // The configuration may be another, and an interrupt of a queue may be missing from the saved local APIC.
    assert_eq!(fired(), [1, 0, 1, 1]);
    other.pci.pause();
    other.pci.resume();
    assert_eq!(fired(), [0; 4]);
    assert_eq!(twin.journal().queues.as_ref().unwrap()[1].queue.next_avail(), 9);
    assert_eq!(other.read::<1>(0x802), [7]);
    assert!(matches!(other.restore(&state), Err(RestoreError::Running)));
}

#[test]
fn a_state_that_does_not_fit_is_refused_and_changes_nothing() {
    let (m, _) = machine();
    m.start();
    let state = m.save();
    let (other, twin) = machine();
    let fresh = other.save();
    let refuse = |field: &str, spoil: &dyn Fn(&mut TransportState)| {
        let mut bad = state.clone();
        spoil(&mut bad);
        match other.restore(&bad) {
            Err(RestoreError::Field { field: named, .. }) => assert_eq!(named, field),
            got => panic!("{field}: {got:?}"),
        }
        assert_eq!(other.save(), fresh);
    };
    refuse("device_type", &|s| s.device_type = 1);
    refuse("config_space", &|s| s.config_space.0[0] ^= 1);
    refuse("config_space", &|s| s.config_space.0.truncate(255));
    refuse("common.queues", &|s| s.common.queues.truncate(2));
    refuse("common.queues", &|s| s.common.queues[1].size = 512);
    refuse("common.queues", &|s| s.common.queues[1].size = 0);
    refuse("common.driver_features", &|s| {
        s.common.driver_features[0] = u32::MAX
    });
    refuse("msix", &|s| s.msix.truncate(1));
    refuse("status", &|s| s.status |= 0x20);
    refuse("status", &|s| s.status = 7);
    refuse("isr", &|s| s.isr = 4);
    refuse("config_vector", &|s| s.config_vector = 4);
    refuse("queue_vectors", &|s| s.queue_vectors.truncate(2));
    refuse("queue_vectors", &|s| s.queue_vectors[1] = 4);
    refuse("rings", &|s| s.status = 3);
    refuse("rings", &|s| s.rings = None);
    refuse("rings", &|s| s.rings.as_mut().unwrap().swap(0, 1));
    refuse("rings", &|s| s.rings.as_mut().unwrap()[0].desc = 0x9000);
    refuse("rings", &|s| s.rings.as_mut().unwrap().truncate(1));
    let mut bad = state.clone();
    bad.device = serde_json::json!([1]).into();
    assert!(matches!(other.restore(&bad), Err(RestoreError::Decode(_))));
    let mut bad = state;
    bad.rings.as_mut().unwrap()[0].desc = MEMORY;
    bad.common.queues[0].desc = MEMORY;
    other.restore(&bad).unwrap();
    other.pci.resume();
    assert_eq!(
        (other.status(), twin.journal().activations),
        (0x4f, 0),
        "rings are checked as ever"
    );
}

#[test]
fn a_device_that_loses_its_queues_needs_a_reset() {
    let (m, device) = machine();
    m.start();
    device.journal().fail = Some(Fail::LoseQueues);
    m.pci.pause();
    m.pci.resume();
    assert_eq!((m.status(), m.ioeventfds.addresses()), (0x4f, vec![]));
}

#[test]
fn a_device_that_needs_a_reset_is_not_started_again_without_one() {
    let (m, device) = machine();
    m.start();
    let interrupt = device.journal().interrupt.clone().unwrap();
    interrupt.needs_reset("test");
    m.pci.pause();
    m.pci.resume();
    assert_eq!((m.status(), device.journal().activations), (0x4f, 1));
    m.write(0x14, &[0]);
    m.start();
    assert_eq!((m.status(), device.journal().activations), (0xf, 2));
}

#[test]
fn a_reboot_leaves_nothing_behind() {
    let (mut m, device) = machine();
    let new = (m.save(), m.root.refresh());
    m.pci.resume();
    m.start();
    m.move_bar(WINDOW + BAR_SIZE);
    m.reboot();
    assert!(device.journal().queues.is_none() && m.ioeventfds.addresses().is_empty());
    assert!(!m.mmio.read(WINDOW + BAR_SIZE, &mut [0]));
    let mut state = m.save();
    state.generation = new.0.generation;
    assert_eq!(state, new.0);
    m.pci.resume();
    m.bar = WINDOW;
    m.start();
    assert_eq!(m.status(), 0xf);
}

#[test]
fn dropping_a_function_stops_its_device() {
    let (m, device) = machine();
    m.start();
    assert!(m.root.remove(fake::SLOT).is_some());
    let Machine {
        pci,
        ioeventfds,
        root,
        ..
    } = m;
    drop((pci, root));
    assert!(device.journal().queues.is_none() && ioeventfds.addresses().is_empty());
}

#[test]
fn an_early_failure_is_reported_at_driver_ok() {
    let (m, device) = machine();
    m.enable();
    device.journal().fail = Some(Fail::PanicInRead);
    m.read::<1>(0x800);
    m.start();
    assert_eq!(
        (m.status(), m.msi.line(3).fired(), device.journal().activations),
        (0x4f, 1, 0)
    );
}
