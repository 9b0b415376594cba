//! The transport by its registers; sections are of the virtio 1.2 specification.

use std::sync::atomic::Ordering;

use super::fake::{self, FEATURES, FakeDevice, Machine, SIZES, VERSION_1, WINDOW, machine};
use crate::virtio::transport::*;

/// Capabilities as (ID, offset).
fn capabilities(m: &Machine) -> Vec<(u8, u64)> {
    let [mut at] = m.config::<1>(0x34);
    let mut found = Vec::new();
    while at != 0 {
        let [id, next] = m.config(u64::from(at));
        found.push((id, u64::from(at)));
        at = next;
    }
    found
}

#[test]
fn the_function_is_a_modern_virtio_device() {
    // Section 4.1.2.
    let (m, _) = machine();
    assert_eq!(m.config::<4>(0), [0xf4, 0x1a, 0x42, 0x10]);
    assert_eq!(m.config::<4>(8), [1, 0x00, 0x80, 0x01]);
    assert!(u16::from_le_bytes(m.config(0x2e)) >= 0x40);
    assert_eq!(m.config::<2>(0x3c), [0, 0], "no interrupt pin");
}

#[test]
fn capabilities_locate_the_structures() {
    // Section 4.1.4: (cfg_type, offset, length) of each; MSI-X has one vector per queue and one more.
    let structures = |m: &Machine| -> Vec<(u8, u32, u32)> {
        let virtio = capabilities(m).into_iter().filter(|(id, _)| *id == 9);
        let dword = |at| u32::from_le_bytes(m.config(at));
        virtio
            .map(|(_, at)| (m.config::<1>(at + 3)[0], dword(at + 8), dword(at + 12)))
            .collect()
    };
    let (m, _) = machine();
    let (first, at) = capabilities(&m)[0];
    assert_eq!((first, m.config::<4>(at)[2..].to_vec()), (0x11, vec![3, 0]));
    let notify = capabilities(&m)[3].1;
    assert_eq!(
        m.config::<4>(notify + 16),
        4_u32.to_le_bytes(),
        "notify_off_multiplier"
    );
    let expected = [
        (1, 0, 0x3c),
        (3, 0x100, 1),
        (2, 0x1000, 12),
        (4, 0x800, 8),
        (5, 0, 0),
    ];
    assert_eq!(structures(&m), expected);
    let without = Machine::new(FakeDevice {
        config_size: 0,
        ..FakeDevice::default()
    });
    assert_eq!(
        structures(&without),
        [&expected[..3], &expected[4..]].concat(),
        "no device configuration"
    );
}

#[test]
fn features_are_offered_in_dwords() {
    // Section 4.1.4.3.
    let (m, _) = machine();
    m.enable();
    let offered = [0_u32, 1, 2, u32::MAX].map(|select| {
        m.write(0, &select.to_le_bytes());
        m.dword(4)
    });
    assert_eq!(offered, [FEATURES as u32, 1, 0, 0]);
}

#[test]
fn features_are_ok_only_if_offered_and_modern() {
    // Sections 2.2 and 6.1.
    for (features, ok) in [
        (VERSION_1, true),
        (VERSION_1 | FEATURES, true),
        (FEATURES, false),
        (VERSION_1 | 1 << 6, false),
        (VERSION_1 | 1 << 33, false),
        (0, false),
    ] {
        let (m, _) = machine();
        m.enable();
        assert_eq!(m.negotiate(features), ok, "{features:#x}");
        m.ready();
        assert_eq!(
            m.status() & status::DRIVER_OK != 0,
            ok,
            "the driver is ready only with features"
        );
    }
    let (m, _) = machine();
    m.enable();
    m.write(8, &2_u32.to_le_bytes());
    m.write(12, &1_u32.to_le_bytes());
    assert!(!m.negotiate(VERSION_1), "a feature beyond 64 bits");
}

#[test]
fn features_do_not_change_once_they_are_ok() {
    let (m, device) = machine();
    m.enable();
    assert!(m.negotiate(VERSION_1));
    m.accept(VERSION_1 | FEATURES);
    m.ready();
    assert_eq!(device.journal().features, VERSION_1);
}

#[test]
fn status_bits_are_only_added() {
    // Section 2.1.1. NEEDS_RESET is not the driver's to set.
    let (m, _) = machine();
    m.enable();
    m.write(0x14, &[3]);
    m.write(0x14, &[1]);
    m.write(0x14, &[0x74]);
    assert_eq!(m.status(), 3);
    m.write(0x14, &[0x80]);
    assert_eq!(m.status(), 0x83);
    m.write(0x14, &[0]);
    assert_eq!(m.status(), 0);
}

#[test]
fn queue_registers_accept_only_valid_values() {
    // Section 4.1.4.3.1 and .2.
    let (m, _) = machine();
    m.enable();
    assert_eq!(m.word(0x12), 3);
    for (queue, size) in (0_u16..).zip(SIZES) {
        m.write(0x16, &queue.to_le_bytes());
        assert_eq!((m.word(0x18), m.word(0x1e), m.word(0x1c)), (size, queue, 0));
        assert_eq!(m.word(0x1a), NO_VECTOR);
    }
    m.write(0x16, &1_u16.to_le_bytes());
    for bad in [0_u16, 3, 512, 0x8000, u16::MAX] {
        m.write(0x18, &bad.to_le_bytes());
        assert_eq!(m.word(0x18), 256, "{bad}");
    }
    m.write(0x18, &64_u16.to_le_bytes());
    m.write(0x20, &0x1_2345_6780_u64.to_le_bytes());
    m.write(0x2c, &1_u32.to_le_bytes());
    m.write(0x28, &0x10_u32.to_le_bytes());
    m.write(0x31, &[0xff; 4]);
    m.write(0x34, &[0xff; 8]);
    m.write(0x18, &[1]);
    assert_eq!(m.word(0x18), 64);
    assert_eq!(
        [0x20, 0x28, 0x30].map(|o| u64::from_le_bytes(m.read(o))),
        [0x1_2345_6780, 0x1_0000_0010, u64::from(u32::MAX) << 32]
    );
    m.write(0x1c, &1_u16.to_le_bytes());
    m.write(0x18, &16_u16.to_le_bytes());
    m.write(0x20, &[0; 8]);
    m.write(0x1c, &0_u16.to_le_bytes());
    assert_eq!(
        (m.word(0x18), m.word(0x1c), m.dword(0x20)),
        (64, 1, 0x2345_6780),
        "fixed once enabled"
    );
}

#[test]
fn queues_that_do_not_exist_read_as_nothing() {
    let (m, _) = machine();
    m.enable();
    for queue in [3_u16, 255, u16::MAX] {
        m.queue(queue, 8, [0x1000; 3]);
        assert_eq!(
            (m.word(0x18), m.word(0x1a), m.word(0x1c), m.dword(0x20)),
            (0, NO_VECTOR, 0, 0)
        );
    }
}

#[test]
fn vectors_that_do_not_exist_map_to_none() {
    // Section 4.1.5.1.2.
    let (m, _) = machine();
    m.enable();
    for (vector, mapped) in [(3_u16, 3), (4, NO_VECTOR), (0, 0), (NO_VECTOR, NO_VECTOR)] {
        for register in [0x10, 0x1a] {
            m.write(register, &vector.to_le_bytes());
            assert_eq!(m.word(register), mapped);
        }
    }
}

#[test]
fn doorbells_follow_the_bar_and_leave_with_the_driver() {
    let (mut m, device) = machine();
    m.start();
    let at = |bar: u64| [bar + 0x1000, bar + 0x1008];
    assert_eq!(m.ioeventfds.addresses(), at(WINDOW));
    m.move_bar(WINDOW + BAR_SIZE);
    assert_eq!(m.ioeventfds.addresses(), at(WINDOW + BAR_SIZE));
    let kicks = || {
        let journal = device.journal();
        journal
            .queues
            .as_ref()
            .unwrap()
            .iter()
            .map(|q| q.kick.read().unwrap_or(0))
            .collect::<Vec<_>>()
    };
    kicks();
    assert!(m.ioeventfds.ring(WINDOW + BAR_SIZE + 0x1008));
    assert_eq!(kicks(), [0, 1]);
    m.set_config(4, &[4]);
    assert!(m.ioeventfds.addresses().is_empty(), "the BAR is not decoded");
    m.set_config(4, &[6]);
    assert_eq!(m.ioeventfds.addresses(), at(WINDOW + BAR_SIZE));
    m.write(0x14, &[0]);
    assert!(m.ioeventfds.addresses().is_empty());
    assert!(!m.ioeventfds.violated.load(Ordering::Relaxed));
}

#[test]
fn notifications_by_exits_arrive_too() {
    // Section 4.1.4.4: the offset selects the queue; without an ioeventfd the write exits to the VMM.
    let (m, device) = machine();
    m.ioeventfds.refuse.store(true, Ordering::Relaxed);
    m.start();
    let kicks = || {
        let journal = device.journal();
        journal
            .queues
            .as_ref()
            .unwrap()
            .iter()
            .map(|q| q.kick.read().unwrap_or(0))
            .collect::<Vec<_>>()
    };
    kicks();
    m.write(0x1008, &2_u16.to_le_bytes());
    assert_eq!(kicks(), [0, 1]);
    for nobody in [0x1004, 0x1001, 0x1ffc, 0x100c] {
        m.write(nobody, &[0; 2]);
    }
    assert_eq!(kicks(), [0, 0]);
    assert_eq!(m.dword(0x1000), 0);
}

#[test]
fn interrupts_go_to_the_mapped_vectors() {
    let (m, device) = machine();
    m.start();
    let interrupt = device.journal().interrupt.clone().unwrap();
    interrupt.signal_queue(2);
    interrupt.signal_queue(2);
    interrupt.signal_queue(1);
    interrupt.signal_queue(77);
    assert_eq!([0, 1, 2, 3].map(|v| m.msi.line(v).fired()), [0, 0, 2, 0]);
    interrupt.queue_event(2).unwrap().write(1).unwrap();
    assert_eq!([0, 1, 2, 3].map(|v| m.msi.line(v).fired()), [0, 0, 1, 0]);
    assert!(interrupt.queue_event(1).is_none() && interrupt.queue_event(77).is_none());
    let generation = m.read::<1>(0x15)[0];
    interrupt.signal_config();
    assert_eq!(m.msi.line(3).fired(), 1);
    assert_eq!(m.read::<1>(0x15)[0], generation.wrapping_add(1));
    interrupt.needs_reset("test");
    interrupt.needs_reset("test");
    assert_eq!((m.msi.line(3).fired(), m.status()), (1, 0x4f), "told once");
}

#[test]
fn without_msix_the_isr_is_set_and_reading_clears_it() {
    // Section 4.1.4.5.
    let (m, device) = machine();
    m.enable();
    assert!(m.negotiate(VERSION_1));
    m.queue(0, 16, [0x1000, 0x2000, 0x3000]);
    m.ready();
    let interrupt = device.journal().interrupt.clone().unwrap();
    interrupt.signal_queue(0);
    interrupt.signal_config();
    assert_eq!([m.read::<1>(0x100), m.read::<1>(0x100)], [[3], [0]]);
}

#[test]
fn device_configuration_ends_where_it_ends() {
    let (m, device) = machine();
    m.enable();
    device.journal().config = [1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(m.read::<8>(0x804), [5, 6, 7, 8, 0, 0, 0, 0]);
    assert_eq!((m.read::<4>(0x808), m.read::<8>(0xff8)), ([0; 4], [0; 8]));
    m.write(0x806, &[9; 4]);
    m.write(0x808, &[9; 4]);
    assert_eq!(device.journal().config, [1, 2, 3, 4, 5, 6, 9, 9]);
}

#[test]
fn the_access_capability_reaches_the_bar() {
    // Section 4.1.4.9.
    let (m, device) = machine();
    let at = capabilities(&m).last().unwrap().1;
    let set = |bar: u8, offset: u32, len: u32| {
        m.set_config(at + 4, &[bar]);
        m.set_config(at + 8, &offset.to_le_bytes());
        m.set_config(at + 12, &len.to_le_bytes());
    };
    set(0, 0x14, 1);
    m.set_config(at + 16, &[1]);
    m.set_config(at + 16, &[3]);
    assert_eq!(m.config::<1>(at + 16), [3]);
    set(0, 0x12, 2);
    assert_eq!(m.config::<4>(at + 16)[..2], [3, 0], "num_queues");
    for (bar, offset, len) in [
        (1, 0x14, 1),
        (0, 0x14, 3),
        (0, 0x14, 0),
        (0, 0x15, 2),
        (0, 0x4000, 4),
    ] {
        set(bar, offset, len);
        m.set_config(at + 16, &[0; 4]);
        m.config::<4>(at + 16);
    }
    m.enable();
    assert_eq!(m.status(), 3, "what is not allowed does nothing");
    for (offset, expected) in [(0x801, [0, 0, 0]), (0x802, [0, 0, 7])] {
        set(0, offset, 2);
        m.set_config(at + 16, &[7; 4]);
        assert_eq!(device.journal().config[..3], expected, "aligned accesses only");
    }
}

#[test]
fn devices_beyond_the_transports_limits_are_refused() {
    let new = |device_type, sizes: Vec<u16>, config_size, bar| {
        let device = FakeDevice {
            device_type,
            sizes,
            config_size,
            ..FakeDevice::default()
        };
        let msi = crate::pci::fake::FakeMsi::default();
        let ioeventfds = Arc::new(fake::FakeIoEventFds::default());
        VirtioPci::new(Box::new(device), fake::memory(), &msi, ioeventfds, bar).map(drop)
    };
    assert!(new(63, vec![0x8000; MAX_QUEUES], 2048, WINDOW).is_ok());
    assert!(matches!(new(64, vec![], 0, WINDOW), Err(VirtioPciError::Shape)));
    assert!(matches!(new(2, vec![], 2049, WINDOW), Err(VirtioPciError::Shape)));
    assert!(matches!(new(2, vec![3], 0, WINDOW), Err(VirtioPciError::Queues)));
    assert!(matches!(new(2, vec![0], 0, WINDOW), Err(VirtioPciError::Queues)));
    assert!(matches!(
        new(2, vec![1; MAX_QUEUES + 1], 0, WINDOW),
        Err(VirtioPciError::Queues)
    ));
    assert!(matches!(
        new(2, vec![1], 0, WINDOW + 0x1000),
        Err(VirtioPciError::Config(_))
    ));
}
