//! Slots and BARs of the root bus.

use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;

use super::*;
use crate::component::Component;
use crate::pci::fake::{Event, FAKE_BAR, FakeFunction};

const WINDOW: Range<u64> = 0x80_0000_0000..0x80_0010_0000;
const A: u64 = WINDOW.start;
const B: u64 = WINDOW.start + FAKE_BAR;

struct Machine {
    mmio: Arc<Bus>,
    root: Arc<PciRoot>,
    ecam: Arc<dyn BusDevice>,
}

fn machine() -> Machine {
    let mmio = Arc::new(Bus::new());
    let root = PciRoot::new(mmio.clone(), vec![0xc000_0000..0xc010_0000, WINDOW]);
    Machine {
        ecam: root.ecam(),
        mmio,
        root,
    }
}

impl Machine {
    fn add(&self, slot: u8, address: u64) -> Arc<FakeFunction> {
        let function = FakeFunction::new(slot, address);
        self.root.add(slot, function.clone()).unwrap();
        function
    }

    fn write(&self, slot: u8, register: u64, data: &[u8]) {
        self.ecam.write(u64::from(slot) << 15 | register, data);
    }

    /// Resets the functions, then the bus.
    fn reset(&self) {
        let functions = (1..SLOTS).filter_map(|slot| self.root.function(slot));
        functions.for_each(|function| function.reset());
        Component::reset(&*self.root);
    }

    fn decode(&self, slot: u8, on: bool) {
        self.write(slot, 4, &[if on { 6 } else { 0 }, 0]);
    }

    /// Tag of the function whose BAR answers, if any.
    fn at(&self, address: u64) -> Option<u8> {
        let mut byte = [0];
        self.mmio.read(address, &mut byte).then_some(byte[0])
    }
}

fn read<const N: usize>(device: &dyn BusDevice, offset: u64) -> [u8; N] {
    let mut data = [0; N];
    device.read(offset, &mut data);
    data
}

#[test]
fn ecam_reaches_function_0_of_each_slot_of_bus_0() {
    // PCI Express base 5.0, table 7-1: bus in bits 27:20, device 19:15, function 14:12.
    let m = machine();
    m.add(31, A);
    assert_eq!(u32::from_le_bytes(read(&*m.ecam, 0)), 0x0008_1b36, "host bridge");
    assert_eq!(u32::from_le_bytes(read(&*m.ecam, 8)) >> 8, 0x06_0000);
    assert_eq!(u32::from_le_bytes(read(&*m.ecam, 31 << 15)), 0x001f_1af4);
    for absent in [
        1 << 15,
        31 << 15 | 1 << 12,
        1 << 20,
        1 << 20 | 31 << 15,
        u64::MAX - 7,
    ] {
        assert_eq!(read(&*m.ecam, absent), [0xff; 4], "{absent:#x}");
        m.ecam.write(absent, &[0; 4]);
    }
    assert_eq!(
        read(&*m.ecam, 0xffe),
        [0xff; 4],
        "an access that leaves the function reaches none"
    );
    assert_eq!(
        read(&*m.ecam, 0x100),
        [0xff; 4],
        "no extended configuration space"
    );
}

#[test]
fn slots_can_be_used_once_and_freed() {
    let m = machine();
    let function = m.add(3, A);
    m.decode(3, true);
    let other = || FakeFunction::new(9, B);
    assert_eq!(m.root.add(3, other()), Err(PciRootError::Occupied(3)));
    assert_eq!(m.root.add(0, other()), Err(PciRootError::BadSlot(0)));
    assert_eq!(m.root.add(32, other()), Err(PciRootError::BadSlot(32)));
    assert!(m.root.is_occupied(0) && !m.root.is_occupied(1) && !m.root.is_occupied(SLOTS));
    assert!(m.root.remove(0).is_none() && m.root.remove(4).is_none() && m.root.remove(77).is_none());
    assert!(m.root.remove(3).is_some());
    assert_eq!(m.at(A), None);
    assert_eq!(function.log(), [Event::Placed(Some(A)), Event::Placed(None)]);
    assert_eq!(read(&*m.ecam, 3 << 15), [0xff; 4]);
    m.add(3, B);
}

#[test]
fn a_bar_follows_its_register_and_command() {
    let m = machine();
    let function = m.add(1, A);
    assert_eq!(m.at(A), None, "memory is not decoded at power-on");
    m.decode(1, true);
    assert_eq!(
        (m.at(A), m.at(A + FAKE_BAR - 1), m.at(A + FAKE_BAR)),
        (Some(1), Some(1), None)
    );
    m.write(1, 0x10, &(B as u32).to_le_bytes());
    assert_eq!((m.at(A), m.at(B)), (None, Some(1)));
    m.mmio.write(B + 8, &[0; 4]);
    m.decode(1, false);
    assert_eq!(m.at(B), None);
    let log = [Some(A), None, Some(B)].map(Event::Placed);
    assert_eq!(
        function.log(),
        [&log[..], &[Event::Written(8), Event::Placed(None)]].concat()
    );
}

#[test]
fn sizing_with_decoding_enabled_moves_it_away_and_back() {
    let m = machine();
    m.add(1, A);
    m.decode(1, true);
    for register in [0x10, 0x14] {
        m.write(1, register, &[0xff; 4]);
    }
    assert_eq!(read(&*m.ecam, 1 << 15 | 0x10), [0x04, 0xf0, 0xff, 0xff]);
    assert_eq!(m.at(A), None);
    assert_eq!(m.at(u64::MAX - 0xfff), None, "outside every window");
    m.write(1, 0x10, &A.to_le_bytes());
    assert_eq!(m.at(A), Some(1));
}

#[test]
fn bars_are_decoded_only_inside_a_window() {
    let m = machine();
    m.add(1, A);
    m.decode(1, true);
    for outside in [
        0,
        0x1000,
        0xfee0_0000,
        0xbfff_f000,
        0xc010_0000,
        WINDOW.end,
        A - FAKE_BAR,
    ] {
        m.write(1, 0x10, &outside.to_le_bytes());
        assert_eq!(m.at(outside), None, "{outside:#x}");
    }
    m.write(1, 0x10, &0xc000_0000_u64.to_le_bytes());
    assert_eq!(m.at(0xc000_0000), Some(1));
    m.write(1, 0x10, &(WINDOW.end - FAKE_BAR).to_le_bytes());
    assert_eq!(m.at(WINDOW.end - 1), Some(1));
}

#[test]
fn the_first_of_two_at_one_address_answers_and_the_other_follows_it() {
    let m = machine();
    m.add(1, A);
    m.add(2, B);
    m.decode(1, true);
    m.decode(2, true);
    m.write(2, 0x10, &A.to_le_bytes());
    assert_eq!((m.at(A), m.at(B)), (Some(1), None));
    m.write(1, 0x10, &B.to_le_bytes());
    assert_eq!(
        (m.at(A), m.at(B)),
        (Some(2), Some(1)),
        "swapped, in whatever order"
    );
    m.write(2, 0x10, &B.to_le_bytes());
    m.root.remove(1);
    assert_eq!((m.at(A), m.at(B)), (None, Some(2)));
}

#[test]
fn reset_puts_bars_back_and_stops_decoding() {
    let m = machine();
    let function = m.add(1, A);
    m.decode(1, true);
    m.write(1, 0x10, &B.to_le_bytes());
    m.reset();
    assert_eq!((m.at(A), m.at(B)), (None, None));
    assert_eq!(function.log()[3..], [Event::Reset, Event::Placed(None)]);
    m.decode(1, true);
    assert_eq!(m.at(A), Some(1));
}

#[derive(Clone, Debug)]
enum Step {
    Write(u8, u64, Vec<u8>),
    Add(u8),
    Remove(u8),
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let slot = 0..4_u8;
    let bar = prop_oneof![
        (0..4_u64).prop_map(|page| A + page * 0x800),
        Just(u64::MAX),
        any::<u64>()
    ];
    let data = prop::collection::vec(any::<u8>(), 1..9);
    prop_oneof![
        4 => (slot.clone(), bar).prop_map(|(slot, bar)| Step::Write(slot, 0x10, bar.to_le_bytes().to_vec())),
        4 => (slot.clone(), 0..8_u8).prop_map(|(slot, command)| Step::Write(slot, 4, vec![command])),
        2 => (slot.clone(), 0..0x1000_u64, data).prop_map(|(slot, at, data)| Step::Write(slot, at, data)),
        2 => slot.clone().prop_map(Step::Add),
        1 => slot.prop_map(Step::Remove),
        1 => Just(Step::Reset),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..Default::default() })]

    /// After any guest writes, the bus holds exactly the BARs that functions decode inside the windows and that
    /// fit, and the functions know their addresses.
    #[test]
    fn the_bus_agrees_with_the_registers(steps in prop::collection::vec(step(), 0..40)) {
        let m = machine();
        let mut functions: [Option<Arc<FakeFunction>>; 4] = Default::default();
        let mut told: [Option<u64>; 4] = [None; 4];
        for step in steps {
            match step {
                Step::Write(slot, register, data) => m.write(slot, register, &data),
                Step::Add(slot) => {
                    let function = FakeFunction::new(slot, A);
                    if m.root.add(slot, function.clone()).is_ok() {
                        functions[usize::from(slot)] = Some(function);
                        told[usize::from(slot)] = None;
                    }
                }
                Step::Remove(slot) => {
                    let removed = m.root.remove(slot).is_some();
                    prop_assert_eq!(removed, functions[usize::from(slot)].take().is_some());
                    told[usize::from(slot)] = None;
                }
                Step::Reset => m.reset(),
            }
            for (function, told) in functions.iter().zip(&mut told) {
                for event in function.iter().flat_map(|f| f.log()) {
                    if let Event::Placed(address) = event {
                        *told = address;
                    }
                }
            }
            for (slot, function) in (0..).zip(&functions) {
                let Some(function) = function else { continue };
                let told = told[usize::from(slot)];
                match function.bars().first() {
                    Some(bar) if m.root.inside_window(bar) => {
                        let owner = m.at(bar.address);
                        prop_assert!(owner.is_some(), "decoded, free, and yet on nobody's behalf");
                        prop_assert_eq!(told, (owner == Some(slot)).then_some(bar.address));
                    }
                    _ => prop_assert_eq!(told, None),
                }
            }
            let on_bus = (0..8).filter_map(|page| m.at(A + page * 0x800)).collect::<Vec<_>>();
            prop_assert!(on_bus.iter().all(|slot| functions[usize::from(*slot)].is_some()));
        }
    }
}

#[test]
fn the_bus_and_its_bridge_are_saved_and_moved_bars_are_found() {
    let m = machine();
    m.add(1, A);
    m.write(0, 0x3c, &[9]);
    m.root.config_address.store(0x8000_0800, Relaxed);
    let state = m.root.save().unwrap();

    let twin = machine();
    let function = twin.add(1, A);
    // What the function's own restore does, without the bus.
    function.config_write(4, &[6, 0]);
    function.config_write(0x10, &B.to_le_bytes());
    assert_eq!(twin.at(B), None);
    twin.root.restore(&state).unwrap();
    assert_eq!((twin.at(B), read(&*twin.ecam, 0x3c)), (Some(1), [9]));
    assert_eq!(twin.root.config_address.load(Relaxed), 0x8000_0800);
    twin.reset();
    assert_eq!((twin.at(B), read(&*twin.ecam, 0x3c)), (None, [0]));

    let mut other: serde_json::Value = state.into();
    other["config_address"] = u32::MAX.into();
    assert!(twin.root.restore(&other.clone().into()).is_err());
    other["config_address"] = 0.into();
    other["bridge"] = serde_json::to_value(crate::component::Bytes(vec![0; 256])).unwrap();
    let error = twin.root.restore(&other.into()).unwrap_err().to_string();
    assert_eq!(
        error,
        "field \"bridge\": has another identity, BARs or capabilities"
    );
    let moved = machine();
    moved.add(2, A);
    let error = moved.root.restore(&m.root.save().unwrap()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "field \"functions\": are others, or in other slots"
    );
}
