//! The root bus: the functions in its slots and the mapping of their BARs.

use std::ops::Range;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, RwLock};

use super::bridge::HostBridge;
use super::device::{Bar, PciDevice};
use crate::bus::{Bus, BusDevice};

mod state;

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
    bridge: Arc<HostBridge>,
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
        let bridge = Arc::new(HostBridge::new());
        slots[0] = Some(bridge.clone());
        Arc::new(Self {
            mmio,
            windows,
            bridge,
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

    /// Maps the BARs of every function as they are now. Needed after something other than the guest changed
    /// configuration space: a reset or a restore.
    pub(crate) fn refresh(&self) {
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
mod tests;
