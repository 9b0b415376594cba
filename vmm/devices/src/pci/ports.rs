//! Configuration mechanism #1: an address port at 0xCF8 and a data port at 0xCFC (PCI 3.0, section
//! 3.2.2.3.2).

use std::sync::Weak;
use std::sync::atomic::{AtomicU32, Ordering};

use super::root::Root;
use super::root::SLOTS;
use crate::bus::BusDevice;

const ENABLE: u32 = 1 << 31;
/// Enable, bus, device, function and dword-aligned register; the reserved bits read as zero.
const IMPLEMENTED: u32 = 0x80ff_fffc;
const DATA: u64 = 4;

/// The two ports. Only a dword at 0xCF8 reaches the address register: other widths are ordinary I/O.
#[derive(Debug)]
pub(super) struct ConfigPorts {
    root: Weak<Root>,
    address: AtomicU32,
}

impl ConfigPorts {
    pub(super) fn new(root: Weak<Root>) -> Self {
        Self {
            root,
            address: AtomicU32::new(0),
        }
    }

    pub(super) fn reset(&self) {
        self.address.store(0, Ordering::Relaxed);
    }

    /// Slot and register that a data-port access at `offset` means.
    fn target(&self, offset: u64) -> Option<(u8, u16)> {
        let address = self.address.load(Ordering::Relaxed);
        let within = u16::try_from(offset.checked_sub(DATA)?).ok()?;
        let (bus, slot, function) = (
            address >> 16 & 0xff,
            (address >> 11 & 0x1f) as u8,
            address >> 8 & 7,
        );
        let there = address & ENABLE != 0 && bus == 0 && function == 0 && slot < SLOTS;
        there.then_some((slot, (address & 0xfc) as u16 + within))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let (0, Ok(dword)) = (offset, <&mut [u8; 4]>::try_from(&mut *data)) {
            *dword = self.address.load(Ordering::Relaxed).to_le_bytes();
            return;
        }
        match (self.target(offset), self.root.upgrade()) {
            (Some((slot, register)), Some(root)) => root.config_read(slot, register, data),
            _ => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (0, Ok(dword)) = (offset, <[u8; 4]>::try_from(data)) {
            self.address
                .store(u32::from_le_bytes(dword) & IMPLEMENTED, Ordering::Relaxed);
            return;
        }
        if let (Some((slot, register)), Some(root)) = (self.target(offset), self.root.upgrade()) {
            root.config_write(slot, register, data);
        }
    }
}
