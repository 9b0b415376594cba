//! The transport under arbitrary guest accesses, between pauses, reboots and failures of the device.

use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::fake::{FEATURES, Fail, FakeDevice, MEMORY, Machine, VERSION_1, WINDOW};
use crate::component::Component;
use crate::component::testing::{mutate, mutation};
use crate::pci::PciDevice;
use crate::virtio::transport::status;

#[derive(Clone, Debug)]
enum Step {
    ConfigWrite(u64, Vec<u8>),
    ConfigRead(u64, usize),
    Write(u64, Vec<u8>),
    Read(u64, usize),
    /// The whole start sequence of a driver, with one ring at these addresses.
    Start(u16, [u64; 3]),
    Reset,
    Pause,
    Resume,
    Reboot,
    /// Save, reset, restore.
    Reload,
    Signal(u16),
    Broken,
    Fail(Option<Fail>),
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let width = prop::sample::select(vec![1_usize, 2, 4, 8, 3]);
    let byte = prop_oneof![Just(0), Just(1), Just(0xff), any::<u8>()];
    width.prop_flat_map(move |width| prop::collection::vec(byte.clone(), width))
}

fn step() -> impl Strategy<Value = Step> {
    let width = prop::sample::select(vec![1_usize, 2, 4, 8]);
    let config = prop_oneof![
        3 => 0..0x100_u64,
        1 => 0..0x1000_u64,
        2 => prop::sample::select(vec![4_u64, 0x10, 0x14, 0x42, 0x98, 0x9c, 0xa0, 0xa4]),
    ];
    let bar = prop_oneof![
        6 => 0..0x40_u64,
        1 => 0..0x4000_u64,
        1 => 0x2000..0x2050_u64,
        1 => 0x1000..0x1010_u64,
    ];
    let page = prop_oneof![
        4 => (1..16_u64).prop_map(|page| page << 12),
        1 => Just(MEMORY - 0x10),
        1 => any::<u64>(),
    ];
    let rings = [page.clone(), page.clone(), page];
    let fail = prop::sample::select(vec![
        None,
        None,
        Some(Fail::Activate),
        Some(Fail::LoseQueues),
        Some(Fail::PanicInActivate),
        Some(Fail::PanicInReset),
        Some(Fail::PanicInRead),
    ]);
    prop_oneof![
        4 => (config.clone(), bytes()).prop_map(|(at, data)| Step::ConfigWrite(at, data)),
        1 => Just(Step::ConfigWrite(4, vec![6, 0])),
        1 => (0..4_u64).prop_map(|page| Step::ConfigWrite(0x10, (WINDOW + page * 0x4000).to_le_bytes().to_vec())),
        1 => (config, width.clone()).prop_map(|(at, len)| Step::ConfigRead(at, len)),
        8 => (bar.clone(), bytes()).prop_map(|(at, data)| Step::Write(at, data)),
        2 => (bar, width).prop_map(|(at, len)| Step::Read(at, len)),
        4 => (0..3_u16, rings).prop_map(|(queue, rings)| Step::Start(queue, rings)),
        1 => Just(Step::Reset),
        1 => Just(Step::Pause),
        1 => Just(Step::Resume),
        1 => Just(Step::Reboot),
        1 => Just(Step::Reload),
        1 => (0..5_u16).prop_map(Step::Signal),
        1 => Just(Step::Broken),
        1 => fail.prop_map(Step::Fail),
    ]
}

/// The BAR's address, if it is mapped.
fn placed(m: &Machine) -> Option<u64> {
    let raw = u64::from_le_bytes(m.config(0x10)) & !0x3fff;
    let [command] = m.config::<1>(4);
    (command & 2 != 0 && m.mmio.read(raw, &mut [0])).then_some(raw)
}

fn write(m: &Machine, offset: u64, data: &[u8]) {
    if let Some(bar) = placed(m) {
        m.mmio.write(bar + offset, data);
    }
}

fn apply(m: &mut Machine, device: &FakeDevice, step: Step) {
    match step {
        Step::ConfigWrite(at, data) => m.set_config(at, &data),
        Step::ConfigRead(at, len) => drop(m.config::<8>(at & !7)[..len].to_vec()),
        Step::Write(at, data) => write(m, at, &data),
        Step::Read(at, len) => {
            if let Some(bar) = placed(m) {
                m.mmio.read(bar + at, &mut vec![0; len]);
            }
        }
        Step::Start(queue, rings) => {
            m.enable();
            if let Some(bar) = placed(m) {
                m.bar = bar;
                m.enable_vectors();
                m.negotiate(FEATURES | VERSION_1);
                m.queue(queue, 8, rings);
                m.ready();
            }
        }
        Step::Reset => write(m, 0x14, &[0]),
        Step::Pause => m.pci.pause(),
        Step::Resume => m.pci.resume(),
        Step::Reboot => m.reboot(),
        Step::Reload => {
            m.pci.pause();
            if let Ok(state) = m.pci.save() {
                m.reboot();
                m.pci.restore(&state).unwrap();
                m.root.refresh();
                m.pci.resume();
            }
        }
        Step::Signal(queue) => {
            let interrupt = device.journal().interrupt.clone();
            if let Some(interrupt) = interrupt {
                interrupt.signal_queue(queue);
                interrupt.signal_config();
            }
        }
        Step::Broken => {
            let interrupt = device.journal().interrupt.clone();
            if let Some(interrupt) = interrupt {
                interrupt.needs_reset("told to");
            }
        }
        Step::Fail(fail) => device.journal().fail = fail,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..Default::default() })]

    #[test]
    fn nothing_a_guest_does_breaks_the_contract(steps in prop::collection::vec(step(), 0..60)) {
        let device = FakeDevice::default();
        let mut m = Machine::new(device.clone());
        for step in steps {
            apply(&mut m, &device, step);

            let bar = placed(&m);
            let mut bits = [0];
            PciDevice::bar_read(&*m.pci, 0, 0x14, &mut bits);
            let journal = device.journal();
            prop_assert!(journal.violations.is_empty(), "{:?}", journal.violations);
            prop_assert!(!m.ioeventfds.violated.load(Ordering::Relaxed));
            if let Some(queues) = &journal.queues {
                prop_assert!(bits[0] & status::DRIVER_OK != 0 && bits[0] & status::FEATURES_OK != 0);
                let expected = queues.iter().filter_map(|q| Some(bar? + 0x1000 + 4 * u64::from(q.index)));
                prop_assert_eq!(m.ioeventfds.addresses(), expected.collect::<Vec<_>>());
            }
            if bits[0] & status::DRIVER_OK == 0 || bar.is_none() {
                prop_assert!(m.ioeventfds.addresses().is_empty());
            }
        }
        device.journal().fail = None;
        m.pci.resume();
        m.reboot();
        m.bar = WINDOW;
        m.start();
        prop_assert_eq!((m.status(), device.journal().queues.is_some()), (0xf, true), "a reboot heals all");
    }

    #[test]
    fn a_hostile_state_is_refused_or_harmless(
        started in any::<bool>(),
        changes in prop::collection::vec(mutation(), 1..4),
        steps in prop::collection::vec(step(), 0..20),
    ) {
        let device = FakeDevice::default();
        let mut m = Machine::new(device.clone());
        if started {
            m.start();
        }
        m.pci.pause();
        let fresh = m.pci.save().unwrap();
        let mut state = fresh.clone();
        changes.iter().for_each(|(place, change)| mutate(&mut state, *place, change));
        if m.pci.restore(&state).is_err() {
            prop_assert_eq!(m.pci.save().unwrap(), fresh);
        }
        m.root.refresh();
        m.pci.resume();
        for step in steps {
            apply(&mut m, &device, step);
        }
        prop_assert!(device.journal().violations.is_empty());
    }
}
