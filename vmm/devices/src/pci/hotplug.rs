//! Register block through which ACPI's methods learn of added and removed slots.
//!
//! | offset | access | register |
//! | --- | --- | --- |
//! | 0 | read | `PCIU`: slots with a function to find; cleared by reading |
//! | 4 | read | `PCID`: slots whose function should be given up; cleared by reading |
//! | 8 | write | `B0EJ`: slots the guest has let go of (`_EJ0`) |
//!
//! One bit per slot, dwords only. Everything else reads as zero and ignores writes. The notify hook raises
//! the interrupt of the generic event device, whose method reads both bitmaps and notifies the slots.

use std::sync::{Arc, Mutex, MutexGuard};

use super::root::{Root, RootError};
use super::{PciDevice, SLOTS};
use crate::bus::BusDevice;

/// Length of the register block in bytes.
pub const REGISTERS: u64 = 12;

const UP: u64 = 0;
const DOWN: u64 = 4;
const EJECT: u64 = 8;

#[derive(Debug, Default)]
struct Slots {
    up: u32,
    down: u32,
    /// Asked for and not ejected yet: only these may the guest eject.
    leaving: u32,
}

type Ejected = dyn Fn(u8, Arc<dyn PciDevice>) + Send + Sync;

/// Hotplug of functions on the root bus.
pub struct Hotplug {
    root: Arc<Root>,
    slots: Mutex<Slots>,
    notify: Box<dyn Fn() + Send + Sync>,
    ejected: Box<Ejected>,
}

impl std::fmt::Debug for Hotplug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hotplug")
            .field("slots", &*self.slots())
            .finish_non_exhaustive()
    }
}

impl Hotplug {
    /// `notify` raises the guest's interrupt. `ejected` is called, mostly on a vCPU thread, with a function
    /// that the guest let go of: it was reset and answers nowhere; whoever owns its resources frees them elsewhere.
    pub fn new(
        root: Arc<Root>,
        notify: impl Fn() + Send + Sync + 'static,
        ejected: impl Fn(u8, Arc<dyn PciDevice>) + Send + Sync + 'static,
    ) -> Self {
        Self {
            root,
            slots: Mutex::default(),
            notify: Box::new(notify),
            ejected: Box::new(ejected),
        }
    }

    /// Puts a function in an empty slot and tells the guest.
    pub fn add(&self, slot: u8, device: Arc<dyn PciDevice>) -> Result<(), RootError> {
        self.root.add(slot, device)?;
        let mut slots = self.slots();
        slots.up |= 1 << slot;
        slots.down &= !(1 << slot);
        slots.leaving &= !(1 << slot);
        drop(slots);
        (self.notify)();
        Ok(())
    }

    /// Asks the guest to give the slot's function up. It may take its time, or never do so.
    pub fn request_removal(&self, slot: u8) -> Result<(), RootError> {
        if slot == 0 || self.root.function(slot).is_none() {
            return Err(RootError::BadSlot(slot));
        }
        let mut slots = self.slots();
        slots.down |= 1 << slot;
        slots.leaving |= 1 << slot;
        drop(slots);
        (self.notify)();
        Ok(())
    }

    /// A VM reboot. The next boot looks at every slot anyway, so nothing is left to be told, and nobody is
    /// left to hold on to functions that were asked for: they go now.
    pub fn reset(&self) {
        let leaving = {
            let mut slots = self.slots();
            (slots.up, slots.down) = (0, 0);
            slots.leaving
        };
        self.eject(leaving);
    }

    fn eject(&self, requested: u32) {
        let granted = {
            let mut slots = self.slots();
            let granted = requested & slots.leaving;
            slots.leaving &= !granted;
            slots.down &= !granted;
            slots.up &= !granted;
            granted
        };
        for slot in (0..SLOTS).filter(|slot| granted & 1 << slot != 0) {
            if let Some(device) = self.root.remove(slot) {
                device.reset();
                (self.ejected)(slot, device);
            }
        }
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl BusDevice for Hotplug {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Ok(dword) = <&mut [u8; 4]>::try_from(data) else {
            return;
        };
        let mut slots = self.slots();
        let value = match offset {
            UP => std::mem::take(&mut slots.up),
            DOWN => std::mem::take(&mut slots.down),
            _ => 0,
        };
        *dword = value.to_le_bytes();
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (EJECT, Ok(dword)) = (offset, <[u8; 4]>::try_from(data)) {
            self.eject(u32::from_le_bytes(dword));
        }
    }
}
