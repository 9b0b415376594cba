//! The root bus: who sits in which slot, and where their BARs answer.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use super::bridge::HostBridge;
use super::ports::ConfigPorts;
use super::{Bar, PciDevice};
use crate::bus::{Bus, BusDevice};

/// Slots of the bus; the host bridge has slot 0.
pub const SLOTS: u8 = 32;

/// Why a function cannot be added or removed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RootError {
    /// Slot 0 is the host bridge's; slots end at 31.
    #[error("PCI slot {0} does not exist or is the host bridge's")]
    BadSlot(u8),
    /// The slot has a function already.
    #[error("PCI slot {0} is in use")]
    Occupied(u8),
}

/// What one slot decodes.
#[derive(Default)]
struct Decode {
    wanted: Vec<Bar>,
    placed: Vec<Bar>,
}

/// The root bus. Functions come and go at any time.
pub struct Root {
    mmio: Arc<Bus>,
    windows: Vec<Range<u64>>,
    slots: RwLock<[Option<Arc<dyn PciDevice>>; SLOTS as usize]>,
    /// Also the lock under which `slots` and the MMIO bus change, so that they agree. Taken before a
    /// function's own lock, never the other way round.
    decode: Mutex<[Decode; SLOTS as usize]>,
    ports: Arc<ConfigPorts>,
}

impl std::fmt::Debug for Root {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let used: Vec<u8> = (0..SLOTS).filter(|slot| self.function(*slot).is_some()).collect();
        f.debug_struct("Root")
            .field("windows", &self.windows)
            .field("slots", &used)
            .finish()
    }
}

impl Root {
    /// A bus with its host bridge in slot 0. BARs are decoded only wholly inside one of `windows`, the
    /// host bridge's `_CRS`, and only where nothing else answers on `mmio`.
    pub fn new(mmio: Arc<Bus>, windows: Vec<Range<u64>>) -> Arc<Self> {
        Arc::new_cyclic(|root| {
            let mut slots: [Option<Arc<dyn PciDevice>>; SLOTS as usize] = Default::default();
            slots[0] = Some(Arc::new(HostBridge::new()));
            let ports = Arc::new(ConfigPorts::new(root.clone()));
            Self {
                mmio,
                windows,
                slots: RwLock::new(slots),
                decode: Mutex::default(),
                ports,
            }
        })
    }

    /// Configuration space by memory (PCI Express base, section 7.2.2): bus 0 in the first MiB, absent
    /// buses after it. Goes on the MMIO bus where the MCFG table says.
    pub fn ecam(self: &Arc<Self>) -> Arc<dyn BusDevice> {
        Arc::new(Ecam(self.clone()))
    }

    /// Configuration space by ports (PCI 3.0, section 3.2.2.3.2): eight bytes for the PIO bus at 0xCF8.
    pub fn ports(&self) -> Arc<dyn BusDevice> {
        self.ports.clone()
    }

    /// Puts a function in a slot, 1 to 31. Telling the guest is [`super::Hotplug`]'s part.
    pub fn add(&self, slot: u8, device: Arc<dyn PciDevice>) -> Result<(), RootError> {
        let mut decode = self.decode();
        let mut slots = self.slots.write().unwrap_or_else(|e| e.into_inner());
        let place = match slots.get_mut(usize::from(slot)) {
            Some(place) if slot != 0 => place,
            _ => return Err(RootError::BadSlot(slot)),
        };
        if place.is_some() {
            return Err(RootError::Occupied(slot));
        }
        *place = Some(device);
        drop(slots);
        self.follow(&mut decode, slot);
        Ok(())
    }

    /// Takes the function out of a slot: it answers nowhere any more. The caller resets and drops it.
    pub fn remove(&self, slot: u8) -> Option<Arc<dyn PciDevice>> {
        let mut decode = self.decode();
        let device = self.function(slot).filter(|_| slot != 0)?;
        self.unplace(&mut decode, slot, &device, |_| true);
        decode[usize::from(slot)].wanted.clear();
        self.slots.write().unwrap_or_else(|e| e.into_inner())[usize::from(slot)] = None;
        self.place(&mut decode);
        Some(device)
    }

    /// The lowest empty slot.
    pub fn free_slot(&self) -> Option<u8> {
        (1..SLOTS).find(|slot| self.function(*slot).is_none())
    }

    /// Every function back to its state at power-on, and its BARs with it: a VM reboot.
    pub fn reset(&self) {
        self.ports.reset();
        for slot in 0..SLOTS {
            if let Some(device) = self.function(slot) {
                device.reset();
            }
        }
        self.refresh();
    }

    /// Asks every function anew what it decodes. Needed after configuration space changed by other means
    /// than the guest, such as a restored snapshot.
    pub fn refresh(&self) {
        let mut decode = self.decode();
        for slot in 0..SLOTS {
            self.follow(&mut decode, slot);
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
            self.follow(&mut self.decode(), slot);
        }
    }

    pub(super) fn function(&self, slot: u8) -> Option<Arc<dyn PciDevice>> {
        self.slots
            .read()
            .unwrap_or_else(|e| e.into_inner())
            .get(usize::from(slot))?
            .clone()
    }

    fn decode(&self) -> MutexGuard<'_, [Decode; SLOTS as usize]> {
        self.decode.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Makes the MMIO bus agree with what the slot's function decodes now.
    fn follow(&self, decode: &mut [Decode; SLOTS as usize], slot: u8) {
        let Some(device) = self.function(slot) else { return };
        let wanted = device.bars();
        if wanted == decode[usize::from(slot)].wanted {
            return;
        }
        self.unplace(decode, slot, &device, |bar| !wanted.contains(bar));
        decode[usize::from(slot)].wanted = wanted;
        self.place(decode);
    }

    fn unplace(
        &self,
        decode: &mut [Decode; SLOTS as usize],
        slot: u8,
        device: &Arc<dyn PciDevice>,
        stale: impl Fn(&Bar) -> bool,
    ) {
        let placed = &mut decode[usize::from(slot)].placed;
        for bar in placed.extract_if(.., |bar| stale(bar)) {
            self.mmio.remove(bar.address);
            device.bar_placed(bar.index, None);
        }
    }

    /// Puts every BAR on the bus that wants to be there and can: also those that another one kept off.
    fn place(&self, decode: &mut [Decode; SLOTS as usize]) {
        for (slot, Decode { wanted, placed }) in (0..SLOTS).zip(decode) {
            for bar in wanted.iter() {
                if placed.contains(bar) || !self.inside_window(bar) {
                    continue;
                }
                let Some(device) = self.function(slot) else {
                    continue;
                };
                let access = Arc::new(BarAccess {
                    device: device.clone(),
                    index: bar.index,
                });
                if self.mmio.insert(bar.address, bar.size, access).is_ok() {
                    device.bar_placed(bar.index, Some(bar.address));
                    placed.push(*bar);
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

struct BarAccess {
    device: Arc<dyn PciDevice>,
    index: u8,
}

impl BusDevice for BarAccess {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.device.bar_read(self.index, offset, data);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        self.device.bar_write(self.index, offset, data);
    }
}

struct Ecam(Arc<Root>);

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
