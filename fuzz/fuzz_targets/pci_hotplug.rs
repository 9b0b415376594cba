//! Feeds register accesses of a guest, plugging and unplugging of the host, and saved states to the PCI hotplug
//! controller. A model of it asserts that the guest learns of each slot once,
//! and that a slot is ejected only after the host has requested it.

#![no_main]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use arbitrary::Arbitrary;
use husk_devices::bus::{Bus, BusDevice};
use husk_devices::component::Component;
use husk_devices::pci::fake::{Event, FAKE_BAR, FakeFunction};
use husk_devices::pci::{PciHotplug, PciRoot, PciRootError, SLOTS};
use husk_fuzz::accesses::Data;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
enum Step {
    Add(u8),
    Request(u8),
    ReadUp,
    ReadDown,
    Eject(u32),
    /// The bits of the slots that are to be ejected, and of some that are not.
    EjectRequested(u32),
    Read {
        offset: u8,
        data: Data,
    },
    Write {
        offset: u8,
        data: Data,
    },
    Decode(u8),
    Reset,
    Reload,
    Restore {
        up: u32,
        down: u32,
        removal_requested: u32,
    },
}

const WINDOW: u64 = 0x80_0000_0000;

#[derive(Default)]
struct Model {
    functions: BTreeMap<u8, Arc<FakeFunction>>,
    up: u32,
    down: u32,
    requested: u32,
    notified: u32,
}

struct Rig {
    root: Arc<PciRoot>,
    hotplug: PciHotplug,
    notified: Arc<AtomicU32>,
    ejected: Arc<Mutex<Vec<u8>>>,
}

impl Rig {
    fn controller(
        root: &Arc<PciRoot>,
        notified: &Arc<AtomicU32>,
        ejected: &Arc<Mutex<Vec<u8>>>,
    ) -> PciHotplug {
        let (notified, ejected) = (notified.clone(), ejected.clone());
        PciHotplug::new(
            root.clone(),
            move || _ = notified.fetch_add(1, Ordering::Relaxed),
            move |slot, _| ejected.lock().expect("no panic").push(slot),
        )
    }

    fn read(&self, offset: u64) -> u32 {
        let mut dword = [0xaa; 4];
        self.hotplug.read(offset, &mut dword);
        u32::from_le_bytes(dword)
    }

    /// Checks that the slots which the guest ejected are those of `expected`, and takes them out of the model.
    fn check_ejected(&self, model: &mut Model, expected: u32) {
        let ejected = std::mem::take(&mut *self.ejected.lock().expect("no panic"));
        let bits = ejected.iter().fold(0_u32, |bits, slot| bits | 1 << slot);
        assert_eq!((bits, bits.count_ones()), (expected, ejected.len() as u32));
        for slot in ejected {
            let function = model.functions.remove(&slot).expect("a function");
            let log = function.log();
            assert!(log.contains(&Event::Reset));
            let placed = log.iter().rev().find_map(|event| match event {
                Event::Placed(address) => Some(*address),
                _ => None,
            });
            assert!(placed.flatten().is_none(), "its BAR is unmapped");
        }
        model.up &= !expected;
        model.down &= !expected;
        model.requested &= !expected;
    }
}

fuzz_target!(|steps: Vec<Step>| {
    let root = PciRoot::new(
        Arc::new(Bus::new()),
        std::iter::once(WINDOW..WINDOW + 0x10_0000).collect(),
    );
    let (notified, ejected) = (Arc::default(), Arc::default());
    let hotplug = Rig::controller(&root, &notified, &ejected);
    let mut rig = Rig {
        root,
        hotplug,
        notified,
        ejected,
    };
    let mut model = Model::default();
    for step in steps.into_iter().take(64) {
        match step {
            Step::Add(slot) => {
                let function = FakeFunction::new(slot, WINDOW + u64::from(slot) * FAKE_BAR);
                let expected = match slot {
                    0 | SLOTS.. => Err(PciRootError::BadSlot(slot)),
                    _ if model.functions.contains_key(&slot) => Err(PciRootError::Occupied(slot)),
                    _ => Ok(()),
                };
                assert_eq!(rig.hotplug.add(slot, function.clone()), expected);
                if expected.is_ok() {
                    model.functions.insert(slot, function);
                    model.up |= 1 << slot;
                    model.notified += 1;
                }
            }
            Step::Request(slot) => {
                let there = model.functions.contains_key(&slot);
                assert_eq!(rig.hotplug.request_removal(slot).is_ok(), there);
                if there {
                    model.down |= 1 << slot;
                    model.requested |= 1 << slot;
                    model.notified += 1;
                }
            }
            Step::ReadUp => assert_eq!(rig.read(0), std::mem::take(&mut model.up)),
            Step::ReadDown => assert_eq!(rig.read(4), std::mem::take(&mut model.down)),
            Step::Eject(bits) => {
                let granted = bits & model.requested;
                rig.hotplug.write(8, &bits.to_le_bytes());
                rig.check_ejected(&mut model, granted);
            }
            Step::EjectRequested(more) => {
                let granted = model.requested;
                rig.hotplug.write(8, &(granted | more).to_le_bytes());
                rig.check_ejected(&mut model, granted);
            }
            Step::Read { offset, data } => {
                let (offset, mut bytes) = (u64::from(offset % 12), vec![0xaa; data.len(4)]);
                if bytes.len() != 4 || !matches!(offset, 0 | 4) {
                    rig.hotplug.read(offset, &mut bytes);
                    assert!(bytes.iter().all(|byte| *byte == 0));
                }
            }
            Step::Write { offset, data } => {
                let (offset, bytes) = (u64::from(offset % 12), data.bytes(4));
                if bytes.len() != 4 || offset != 8 {
                    rig.hotplug.write(offset, &bytes);
                    rig.check_ejected(&mut model, 0);
                }
            }
            Step::Decode(slot) => rig.root.ecam().write(u64::from(slot % SLOTS) << 15 | 4, &[6, 0]),
            Step::Reset => {
                rig.hotplug.reset();
                let requested = model.requested;
                rig.check_ejected(&mut model, requested);
                (model.up, model.down) = (0, 0);
            }
            Step::Reload => {
                let state = rig.hotplug.save().expect("it is saved");
                rig.hotplug = Rig::controller(&rig.root, &rig.notified, &rig.ejected);
                rig.hotplug.restore(&state).expect("its own state");
                assert_eq!(rig.hotplug.save().expect("it is saved"), state);
            }
            Step::Restore {
                up,
                down,
                removal_requested,
            } => {
                let state = serde_json::json!({
                    "up": up, "down": down, "removal_requested": removal_requested
                });
                let there = model.functions.keys().fold(0_u32, |bits, slot| bits | 1 << slot);
                let fits = (up | removal_requested) & !there == 0 && down & !removal_requested == 0;
                assert_eq!(rig.hotplug.restore(&state.into()).is_ok(), fits);
                if fits {
                    (model.up, model.down, model.requested) = (up, down, removal_requested);
                }
            }
        }
        assert_eq!(rig.notified.load(Ordering::Relaxed), model.notified);
        assert!((1..SLOTS).all(|slot| rig.root.is_occupied(slot) == model.functions.contains_key(&slot)));
    }
});
