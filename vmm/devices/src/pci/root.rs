//! The root bus: the functions in its slots and the mapping of their BARs.

use std::ops::Range;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use super::bridge::HostBridge;
use super::device::{Bar, PciDevice};
use crate::bus::{Bus, BusDevice};

/// Slots of the bus; the host bridge has slot 0.
pub const SLOTS: u8 = 32;

/// Errors of adding or removing a function.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PciRootError {
    /// Slot 0 is the host bridge's; slots end at 31.
    #[error("PCI slot {0} does not exist or is the host bridge's")]
    BadSlot(u8),
    /// The slot has a function already.
    #[error("PCI slot {0} is in use")]
    Occupied(u8),
}

/// The BARs of one slot: those it decodes, and those mapped.
#[derive(Default)]
struct SlotDecode {
    decoded: Vec<Bar>,
    mapped: Vec<Bar>,
}

/// The root bus. Functions can be added and removed at any time.
pub struct PciRoot {
    mmio: Arc<Bus>,
    windows: Vec<Range<u64>>,
    slots: RwLock<[Option<Arc<dyn PciDevice>>; SLOTS as usize]>,
    /// Also the lock under which `slots` and the MMIO bus change, so that they agree. Taken before a
    /// function's own lock, never the other way round.
    decode: Mutex<[SlotDecode; SLOTS as usize]>,
    /// The address register of configuration mechanism #1. [`ConfigPorts`](super::ConfigPorts) serves it.
    pub(super) config_address: AtomicU32,
}

impl std::fmt::Debug for PciRoot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let used: Vec<u8> = (0..SLOTS).filter(|slot| self.function(*slot).is_some()).collect();
        f.debug_struct("PciRoot")
            .field("windows", &self.windows)
            .field("slots", &used)
            .finish()
    }
}

impl PciRoot {
    /// A bus with its host bridge in slot 0. BARs are decoded only wholly inside one of `windows`, the
    /// host bridge's `_CRS`, and only where nothing else answers on `mmio`.
    pub fn new(mmio: Arc<Bus>, windows: Vec<Range<u64>>) -> Arc<Self> {
        let mut slots: [Option<Arc<dyn PciDevice>>; SLOTS as usize] = Default::default();
        slots[0] = Some(Arc::new(HostBridge::new()));
        Arc::new(Self {
            mmio,
            windows,
            slots: RwLock::new(slots),
            decode: Mutex::default(),
            config_address: AtomicU32::new(0),
        })
    }

    /// Configuration space by memory (PCI Express base, section 7.2.2): bus 0 in the first MiB.
    /// Belongs on the MMIO bus at the address in the MCFG table.
    pub fn ecam(self: &Arc<Self>) -> Arc<dyn BusDevice> {
        Arc::new(Ecam(self.clone()))
    }

    /// Adds a function in a slot, 1 to 31. [`super::PciHotplug`] notifies the guest.
    ///
    /// # Errors
    /// The slot does not exist or is occupied.
    pub fn add(&self, slot: u8, device: Arc<dyn PciDevice>) -> Result<(), PciRootError> {
        let mut decode = self.decode();
        let mut slots = self.slots.write().unwrap_or_else(|e| e.into_inner());
        let place = match slots.get_mut(usize::from(slot)) {
            Some(place) if slot != 0 => place,
            _ => return Err(PciRootError::BadSlot(slot)),
        };
        if place.is_some() {
            return Err(PciRootError::Occupied(slot));
        }
        *place = Some(device);
        drop(slots);
        self.update_bars(&mut decode, slot);
        Ok(())
    }

    /// Removes the function from a slot and unmaps its BARs. The caller resets and drops it.
    pub fn remove(&self, slot: u8) -> Option<Arc<dyn PciDevice>> {
        let mut decode = self.decode();
        let device = self.function(slot).filter(|_| slot != 0)?;
        self.unmap_bars(&mut decode, slot, &device, |_| true);
        decode[usize::from(slot)].decoded.clear();
        self.slots.write().unwrap_or_else(|e| e.into_inner())[usize::from(slot)] = None;
        self.map_bars(&mut decode);
        Some(device)
    }

    /// True if the slot has a function.
    pub fn is_occupied(&self, slot: u8) -> bool {
        self.function(slot).is_some()
    }

    /// Resets every function and its BARs to the power-on state, on a VM reboot.
    pub fn reset(&self) {
        self.config_address.store(0, Relaxed);
        for slot in 0..SLOTS {
            if let Some(device) = self.function(slot) {
                device.reset();
            }
        }
        self.refresh();
    }

    /// Maps the BARs of every function as they are now. Needed after something other than the guest changed
    /// configuration space, such as a restored snapshot.
    pub fn refresh(&self) {
        let mut decode = self.decode();
        for slot in 0..SLOTS {
            self.update_bars(&mut decode, slot);
        }
    }

    pub(super) fn config_read(&self, slot: u8, offset: u16, data: &mut [u8]) {
        match self.function(slot) {
            Some(device) => device.config_read(offset, data),
            None => data.fill(0xff),
        }
    }

    pub(super) fn config_write(&self, slot: u8, offset: u16, data: &[u8]) {
        if let Some(device) = self.function(slot) {
            device.config_write(offset, data);
            self.update_bars(&mut self.decode(), slot);
        }
    }

    pub(super) fn function(&self, slot: u8) -> Option<Arc<dyn PciDevice>> {
        self.slots
            .read()
            .unwrap_or_else(|e| e.into_inner())
            .get(usize::from(slot))?
            .clone()
    }

    fn decode(&self) -> MutexGuard<'_, [SlotDecode; SLOTS as usize]> {
        self.decode.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Updates the MMIO bus to the BARs that the slot's function decodes.
    fn update_bars(&self, decode: &mut [SlotDecode; SLOTS as usize], slot: u8) {
        let Some(device) = self.function(slot) else { return };
        let decoded = device.bars();
        if decoded == decode[usize::from(slot)].decoded {
            return;
        }
        self.unmap_bars(decode, slot, &device, |bar| !decoded.contains(bar));
        decode[usize::from(slot)].decoded = decoded;
        self.map_bars(decode);
    }

    fn unmap_bars(
        &self,
        decode: &mut [SlotDecode; SLOTS as usize],
        slot: u8,
        device: &Arc<dyn PciDevice>,
        stale: impl Fn(&Bar) -> bool,
    ) {
        let mapped = &mut decode[usize::from(slot)].mapped;
        for bar in mapped.extract_if(.., |bar| stale(bar)) {
            self.mmio.remove(bar.address);
            device.bar_mapped(bar.index, None);
        }
    }

    /// Maps every decoded BAR that fits, also those that an overlapping BAR prevented before.
    fn map_bars(&self, decode: &mut [SlotDecode; SLOTS as usize]) {
        for (slot, SlotDecode { decoded, mapped }) in (0..SLOTS).zip(decode) {
            for bar in decoded.iter() {
                if mapped.contains(bar) || !self.inside_window(bar) {
                    continue;
                }
                let Some(device) = self.function(slot) else {
                    continue;
                };
                let access = Arc::new(BarWindow {
                    device: device.clone(),
                    index: bar.index,
                });
                if self.mmio.insert(bar.address, bar.size, access).is_ok() {
                    device.bar_mapped(bar.index, Some(bar.address));
                    mapped.push(*bar);
                }
            }
        }
    }

    fn inside_window(&self, bar: &Bar) -> bool {
        let Some(end) = bar.address.checked_add(bar.size) else {
            return false;
        };
        self.windows
            .iter()
            .any(|window| window.start <= bar.address && end <= window.end)
    }
}

struct BarWindow {
    device: Arc<dyn PciDevice>,
    index: u8,
}

impl BusDevice for BarWindow {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.device.bar_read(self.index, offset, data);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        self.device.bar_write(self.index, offset, data);
    }
}

struct Ecam(Arc<PciRoot>);

impl Ecam {
    /// Slot and register of an access inside function 0 of a slot of bus 0.
    fn decode(offset: u64, len: usize) -> Option<(u8, u16)> {
        let (slot, function) = (offset >> 15, offset >> 12 & 7);
        let register = (offset & 0xfff) as u16;
        let inside = function == 0 && usize::from(register) + len <= 0x1000;
        u8::try_from(slot)
            .ok()
            .filter(|slot| inside && *slot < SLOTS)
            .map(|slot| (slot, register))
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match Self::decode(offset, data.len()) {
            Some((slot, register)) => self.0.config_read(slot, register, data),
            None => data.fill(0xff),
        }
    }
    fn write(&self, offset: u64, data: &[u8]) {
        if let Some((slot, register)) = Self::decode(offset, data.len()) {
            self.0.config_write(slot, register, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::fake::{Event, FAKE_BAR, FakeFunction};
    use super::*;

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
        m.root.reset();
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
                    Step::Reset => m.root.reset(),
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
}
