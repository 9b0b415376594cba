//! Configuration mechanism #1: an address port at 0xCF8 and a data port at 0xCFC (PCI 3.0, section
//! 3.2.2.3.2).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::root::PciRoot;
use super::root::SLOTS;
use crate::bus::BusDevice;

const ENABLE: u32 = 1 << 31;
/// Enable, bus, device, function and dword-aligned register; the reserved bits read as zero.
pub(super) const IMPLEMENTED: u32 = 0x80ff_fffc;
const DATA: u64 = 4;

/// The two ports, eight bytes for the PIO bus at 0xCF8.
///
/// Only a dword at 0xCF8 reaches the address register: other widths are ordinary I/O.
#[derive(Debug)]
pub struct ConfigPorts(Arc<PciRoot>);

impl ConfigPorts {
    /// The ports of `root`, whose reset clears the address register.
    pub fn new(root: Arc<PciRoot>) -> Self {
        Self(root)
    }

    /// Slot and register of a data-port access at `offset`.
    fn target(&self, offset: u64) -> Option<(u8, u16)> {
        let address = self.0.config_address.load(Ordering::Relaxed);
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
            *dword = self.0.config_address.load(Ordering::Relaxed).to_le_bytes();
            return;
        }
        match self.target(offset) {
            Some((slot, register)) => self.0.config_read(slot, register, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (0, Ok(dword)) = (offset, <[u8; 4]>::try_from(data)) {
            self.0
                .config_address
                .store(u32::from_le_bytes(dword) & IMPLEMENTED, Ordering::Relaxed);
            return;
        }
        if let Some((slot, register)) = self.target(offset) {
            self.0.config_write(slot, register, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::FakeFunction;
    use super::*;
    use crate::bus::Bus;

    fn machine() -> (Arc<PciRoot>, Bus) {
        let root = PciRoot::new(Arc::new(Bus::new()), vec![]);
        let pio = Bus::new();
        pio.insert(0xcf8, 8, Arc::new(ConfigPorts::new(root.clone())))
            .unwrap();
        (root, pio)
    }

    fn inl(pio: &Bus, port: u64) -> u32 {
        let mut data = [0; 4];
        pio.read(port, &mut data);
        u32::from_le_bytes(data)
    }

    fn outl(pio: &Bus, port: u64, value: u32) {
        pio.write(port, &value.to_le_bytes());
    }

    #[test]
    fn linux_finds_configuration_type_1() {
        // The steps of arch/x86/pci/direct.c: a byte to 0xCFB, save, enable, read back, look for a bridge.
        let (_root, pio) = machine();
        pio.write(0xcfb, &[1]);
        let saved = inl(&pio, 0xcf8);
        assert_eq!(saved, 0, "a byte does not reach the address register");
        outl(&pio, 0xcf8, 0x8000_0000);
        assert_eq!(inl(&pio, 0xcf8), 0x8000_0000);
        outl(&pio, 0xcf8, 0x8000_0008);
        let mut class = [0; 2];
        pio.read(0xcfe, &mut class);
        assert_eq!(u16::from_le_bytes(class), 0x0600);
    }

    #[test]
    fn the_address_register_is_a_dword_with_reserved_bits() {
        // PCI 3.0, figure 3-2: bits 30:24 and 1:0 are reserved, read-only, zero.
        let (_root, pio) = machine();
        outl(&pio, 0xcf8, u32::MAX);
        assert_eq!(inl(&pio, 0xcf8), 0x80ff_fffc);
        pio.write(0xcf8, &[0]);
        pio.write(0xcf9, &[6]);
        pio.write(0xcfa, &[0, 0]);
        pio.write(0xcfa, &[0; 4]);
        assert_eq!(inl(&pio, 0xcf8), 0x80ff_fffc);
        let mut byte = [0];
        pio.read(0xcf9, &mut byte);
        assert_eq!(byte, [0xff]);
        assert_eq!(inl(&pio, 0xcfa), u32::MAX);
    }

    #[test]
    fn data_is_reached_by_byte_word_and_dword_while_enabled() {
        let (root, pio) = machine();
        root.add(2, FakeFunction::new(0x42, 0)).unwrap();
        outl(&pio, 0xcf8, 0x8000_1000);
        assert_eq!(inl(&pio, 0xcfc), 0x0042_1af4);
        let (mut word, mut byte) = ([0; 2], [0]);
        pio.read(0xcfe, &mut word);
        pio.read(0xcfd, &mut byte);
        assert_eq!((word, byte), ([0x42, 0], [0x1a]));
        outl(&pio, 0xcf8, 0x8000_103c);
        pio.write(0xcfc, &[9]);
        pio.write(0xcfd, &[1]);
        assert_eq!(inl(&pio, 0xcfc), 9);
        outl(&pio, 0xcf8, 0x0000_103c);
        assert_eq!(inl(&pio, 0xcfc), u32::MAX, "not enabled");
        pio.write(0xcfc, &[7]);
        outl(&pio, 0xcf8, 0x8000_103c);
        assert_eq!(inl(&pio, 0xcfc), 9);
        for absent in [0x8000_1100, 0x8001_1000, 0x8000_1800] {
            outl(&pio, 0xcf8, absent);
            assert_eq!(inl(&pio, 0xcfc), u32::MAX, "{absent:#x}");
        }
    }
}
