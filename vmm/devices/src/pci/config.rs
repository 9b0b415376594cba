//! Type 0 configuration space of a function (PCI Local Bus 3.0, section 6.1), with write masks per bit.
//!
//! Functions here have no PCI Express capability, so only the conventional 256 bytes exist: what ECAM
//! reaches beyond them reads as all ones, so that guests find no extended capabilities.

use super::device::Bar;
use crate::component::{Bytes, RestoreError, check};

/// Offsets of the header's registers (PCI 3.0, figure 6-1).
pub mod reg {
    /// Vendor ID, 16 bits.
    pub const VENDOR: u16 = 0x00;
    /// Device ID, 16 bits.
    pub const DEVICE: u16 = 0x02;
    /// Command, 16 bits.
    pub const COMMAND: u16 = 0x04;
    /// Status, 16 bits.
    pub const STATUS: u16 = 0x06;
    /// Revision, 8 bits; then the class code, 24 bits.
    pub const REVISION: u16 = 0x08;
    /// Cache line size, 8 bits.
    pub const CACHE_LINE: u16 = 0x0c;
    /// First of six base address registers, 32 bits each.
    pub const BAR0: u16 = 0x10;
    /// Subsystem vendor ID, then subsystem ID, 16 bits each.
    pub const SUBSYSTEM: u16 = 0x2c;
    /// Offset of the first capability, 8 bits.
    pub const CAPABILITIES: u16 = 0x34;
    /// Interrupt line, 8 bits.
    pub const INTERRUPT_LINE: u16 = 0x3c;
}

/// COMMAND: respond to memory accesses.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// COMMAND: may access memory and send message-signalled interrupts.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// STATUS: the capabilities list is implemented.
const STATUS_CAPABILITIES: u16 = 1 << 4;
/// COMMAND bits a guest may set: memory, master, parity, SERR#, interrupt disable. No I/O BAR, no I/O bit.
const COMMAND_WRITABLE: u16 = COMMAND_MEMORY | COMMAND_MASTER | 1 << 6 | 1 << 8 | 1 << 10;

/// Bytes of configuration space that exist.
pub const SIZE: usize = 256;
const FIRST_CAPABILITY: u16 = 0x40;

/// Identification registers of a function (PCI 3.0, section 6.2.1).
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Revision.
    pub revision: u8,
    /// Base class, subclass, programming interface.
    pub class: [u8; 3],
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
}

/// Kind of a memory BAR. Every BAR is 64 bits wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// Reads have side effects.
    Registers,
    /// Reads have none: bridges may prefetch and merge.
    Prefetchable,
}

/// Errors of building a configuration space. The device model is wrong; a guest cannot cause them.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// The capabilities do not fit in 256 bytes.
    #[error("capability {0:#x} does not fit in configuration space")]
    NoRoom(u8),
    /// Not an even BAR number below 6, already in use, or its size is no power of two of at least 16 bytes.
    #[error(
        "BAR {0} is invalid: use an unused even number below 6 and a power-of-two size of at least 16 bytes"
    )]
    BadBar(u8),
    /// The address is not a multiple of the BAR's size.
    #[error("BAR {0}: address is not a multiple of its size")]
    Misaligned(u8),
}

/// A function's configuration space.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: [u8; SIZE],
    initial: [u8; SIZE],
    writable: [u8; SIZE],
    /// BAR number and size.
    bars: Vec<(u8, u64)>,
    last_link: u16,
    end: u16,
}

impl ConfigSpace {
    /// A header without BARs, capabilities or interrupt pin.
    pub fn new(id: Identity) -> Self {
        let mut space = Self {
            bytes: [0; SIZE],
            initial: [0; SIZE],
            writable: [0; SIZE],
            bars: Vec::new(),
            last_link: reg::CAPABILITIES,
            end: FIRST_CAPABILITY,
        };
        let [base, sub, interface] = id.class;
        space.set(reg::VENDOR, &id.vendor.to_le_bytes());
        space.set(reg::DEVICE, &id.device.to_le_bytes());
        space.set(reg::REVISION, &[id.revision, interface, sub, base]);
        space.set(reg::SUBSYSTEM, &id.subsystem_vendor.to_le_bytes());
        space.set(reg::SUBSYSTEM + 2, &id.subsystem.to_le_bytes());
        space.allow(reg::COMMAND, &COMMAND_WRITABLE.to_le_bytes());
        space.allow(reg::CACHE_LINE, &[0xff]);
        space.allow(reg::INTERRUPT_LINE, &[0xff]);
        space
    }

    /// Adds a 64-bit memory BAR that starts at `address` (PCI 3.0, section 6.2.5.1).
    pub fn add_bar(&mut self, index: u8, size: u64, kind: BarKind, address: u64) -> Result<(), ConfigError> {
        let free = self.bars.iter().all(|(used, _)| *used != index);
        if !free || index > 4 || !index.is_multiple_of(2) || !size.is_power_of_two() || size < 16 {
            return Err(ConfigError::BadBar(index));
        }
        if !address.is_multiple_of(size) {
            return Err(ConfigError::Misaligned(index));
        }
        // Type bits: memory, 64 bits wide.
        let flags = 0b100 | if kind == BarKind::Prefetchable { 0b1000 } else { 0 };
        let offset = reg::BAR0 + 4 * u16::from(index);
        self.set(offset, &(address | flags).to_le_bytes());
        self.allow(offset, &(!(size - 1)).to_le_bytes());
        self.bars.push((index, size));
        Ok(())
    }

    /// Appends a capability (PCI 3.0, section 6.7) and returns its offset. `body` follows the ID and the
    /// link; `writable` masks the first bytes of `body` that a guest may change.
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> Result<u16, ConfigError> {
        let offset = self.end;
        let end = (usize::from(offset) + 2 + body.len()).next_multiple_of(4);
        if end > SIZE || writable.len() > body.len() {
            return Err(ConfigError::NoRoom(id));
        }
        self.set(offset, &[id, 0]);
        self.set(offset + 2, body);
        self.allow(offset + 2, writable);
        // `offset` and `end` are at most SIZE: a capability starts below it, so its offset fits a byte.
        self.set(self.last_link, &[offset as u8]);
        let status = self.u16(reg::STATUS) | STATUS_CAPABILITIES;
        self.set(reg::STATUS, &status.to_le_bytes());
        self.last_link = offset + 1;
        self.end = end as u16;
        Ok(offset)
    }

    /// A guest read of any width at any offset.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = self.bytes.get(usize::from(offset) + i).copied().unwrap_or(0xff);
        }
    }

    /// A guest write of any width at any offset; only writable bits change.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        for (i, byte) in data.iter().enumerate() {
            let at = usize::from(offset) + i;
            if let (Some(old), Some(mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *old = *old & !mask | byte & mask;
            }
        }
    }

    /// The register at `offset`, which must lie in the first 256 bytes, as the device sees it.
    pub fn u16(&self, offset: u16) -> u16 {
        u16::from_le_bytes(self.array(offset))
    }

    /// The register at `offset`, which must lie in the first 256 bytes, as the device sees it.
    pub fn u32(&self, offset: u16) -> u32 {
        u32::from_le_bytes(self.array(offset))
    }

    /// True if the guest lets the function access memory and send interrupts (bus master enable).
    pub fn is_master(&self) -> bool {
        self.u16(reg::COMMAND) & COMMAND_MASTER != 0
    }

    /// The BARs that are decoded: all of them if COMMAND enables memory, else none.
    pub fn decoded(&self) -> Vec<Bar> {
        if self.u16(reg::COMMAND) & COMMAND_MEMORY == 0 {
            return Vec::new();
        }
        let bar = |&(index, size): &(u8, u64)| {
            let raw = u64::from_le_bytes(self.array(reg::BAR0 + 4 * u16::from(index)));
            Bar {
                index,
                address: raw & !(size - 1),
                size,
            }
        };
        self.bars.iter().map(bar).collect()
    }

    /// Resets all registers to their power-on values.
    pub fn reset(&mut self) {
        self.bytes = self.initial;
    }

    /// All 256 bytes, for [`ConfigSpace::load`].
    pub fn save(&self) -> Bytes {
        self.bytes.into()
    }

    /// Checks that saved bytes are those of a function with the same identity, BARs and capabilities.
    ///
    /// # Errors
    /// They are not. Names `field`.
    pub fn check(&self, saved: &Bytes, field: &'static str) -> Result<(), RestoreError> {
        let saved = saved.array::<SIZE>(field)?;
        let differs = |(at, byte): (usize, u8)| (byte ^ self.initial[at]) & !self.writable[at] != 0;
        let same = !saved.into_iter().enumerate().any(differs);
        check(same, field, "has another identity, BARs or capabilities")
    }

    /// Restores the writable bits from bytes that passed [`ConfigSpace::check`].
    pub fn load(&mut self, saved: &Bytes) {
        self.write(0, &saved.0);
    }

    /// Sets bytes and their power-on values.
    fn set(&mut self, offset: u16, data: &[u8]) {
        let at = usize::from(offset);
        self.bytes[at..at + data.len()].copy_from_slice(data);
        self.initial[at..at + data.len()].copy_from_slice(data);
    }

    fn allow(&mut self, offset: u16, mask: &[u8]) {
        let at = usize::from(offset);
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    fn array<const N: usize>(&self, offset: u16) -> [u8; N] {
        let mut bytes = [0; N];
        self.read(offset, &mut bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: Identity = Identity {
        vendor: 0x1af4,
        device: 0x1042,
        revision: 1,
        class: [0x01, 0x80, 0x02],
        subsystem_vendor: 0x1af4,
        subsystem: 0x1100,
    };

    fn dword(space: &ConfigSpace, offset: u16) -> u32 {
        let mut data = [0; 4];
        space.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn header_registers_stand_where_the_specification_puts_them() {
        // PCI 3.0, section 6.1, figure 6-1; class code byte order of section 6.2.1.
        let space = ConfigSpace::new(ID);
        assert_eq!(dword(&space, 0x00), 0x1042_1af4);
        assert_eq!(dword(&space, 0x04), 0);
        assert_eq!(dword(&space, 0x08), 0x0180_0201);
        assert_eq!(dword(&space, 0x0c), 0, "type 0, single function");
        assert_eq!(dword(&space, 0x2c), 0x1100_1af4);
        assert_eq!(dword(&space, 0x34), 0, "no capabilities");
        assert_eq!(dword(&space, 0x3c), 0, "no interrupt pin");
        assert_eq!(dword(&space, 0x100), u32::MAX, "no extended configuration space");
    }

    #[test]
    fn read_only_registers_and_unimplemented_command_bits_ignore_writes() {
        let mut space = ConfigSpace::new(ID);
        let before = space.save();
        space.write(0, &[0xff; 4]);
        space.write(8, &[0xff; 4]);
        space.write(0x2c, &[0xff; 16]);
        assert_eq!(space.save(), before);
        space.write(4, &[0xff; 4]);
        // Section 6.2.2: bits of unimplemented features (I/O space, VGA snoop …) are hardwired to 0.
        assert_eq!(dword(&space, 4), 0x0546, "and STATUS keeps its value");
        space.write(0x3c, &[11]);
        assert_eq!(dword(&space, 0x3c), 11);
        space.reset();
        assert_eq!(space.save(), before);
    }

    #[test]
    fn sizing_a_bar_reads_back_its_size_and_type() {
        // PCI 3.0, section 6.2.5.1: write all ones, read back; low four bits are the type.
        let mut space = ConfigSpace::new(ID);
        space
            .add_bar(0, 0x4000, BarKind::Registers, 0x80_0000_4000)
            .unwrap();
        space
            .add_bar(2, 0x10_0000, BarKind::Prefetchable, 0x80_0010_0000)
            .unwrap();
        assert_eq!((dword(&space, 0x10), dword(&space, 0x14)), (0x4004, 0x80));
        assert_eq!((dword(&space, 0x18), dword(&space, 0x1c)), (0x10_000c, 0x80));
        for offset in (0x10..0x30).step_by(4) {
            space.write(offset, &[0xff; 4]);
        }
        assert_eq!(
            (dword(&space, 0x10), dword(&space, 0x14)),
            (0xffff_c004, u32::MAX)
        );
        assert_eq!(
            (dword(&space, 0x18), dword(&space, 0x1c)),
            (0xfff0_000c, u32::MAX)
        );
        assert_eq!(
            (dword(&space, 0x20), dword(&space, 0x24)),
            (0, 0),
            "not implemented: hardwired to 0"
        );
        assert_eq!(
            (dword(&space, 0x28), dword(&space, 0x30)),
            (0, 0),
            "no CardBus pointer, no ROM"
        );
    }

    #[test]
    fn bars_are_decoded_only_while_command_enables_memory() {
        let mut space = ConfigSpace::new(ID);
        space
            .add_bar(0, 0x4000, BarKind::Registers, 0x80_0000_0000)
            .unwrap();
        assert_eq!(space.decoded(), []);
        space.write(4, &[2]);
        assert_eq!(
            space.decoded(),
            [Bar {
                index: 0,
                address: 0x80_0000_0000,
                size: 0x4000
            }]
        );
        space.write(0x11, &[0x40]);
        assert_eq!(
            space.decoded()[0].address,
            0x80_0000_4000,
            "a byte write changes its byte alone"
        );
        space.write(4, &[0]);
        assert_eq!(space.decoded(), []);
    }

    #[test]
    fn capabilities_form_a_list_of_aligned_entries() {
        // PCI 3.0, section 6.7.
        let mut space = ConfigSpace::new(ID);
        let first = space
            .add_capability(0x11, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], &[0, 0xc0])
            .unwrap();
        let second = space.add_capability(0x09, &[3, 0xaa, 0xbb], &[]).unwrap();
        let third = space.add_capability(0x09, &[3], &[]).unwrap();
        assert_eq!([first, second, third], [0x40, 0x4c, 0x54]);
        assert_eq!(
            dword(&space, 0x04) >> 16,
            0x10,
            "STATUS says that there is a list"
        );
        assert_eq!(dword(&space, 0x34), 0x40);
        assert_eq!(dword(&space, 0x40), 0x0201_4c11);
        assert_eq!(dword(&space, 0x4c), 0xaa03_5409);
        assert_eq!(dword(&space, 0x54), 0x0003_0009, "the last link is 0");
        space.write(0x40, &[0xff; 4]);
        assert_eq!(
            dword(&space, 0x40),
            0xc201_4c11,
            "only the masked bits are writable"
        );
    }

    #[test]
    fn capabilities_and_bars_that_do_not_fit_are_refused() {
        let mut space = ConfigSpace::new(ID);
        assert_eq!(
            space.add_capability(9, &[0; 191], &[]),
            Err(ConfigError::NoRoom(9))
        );
        assert_eq!(space.add_capability(9, &[0; 190], &[]), Ok(0x40));
        assert_eq!(space.add_capability(9, &[0; 1], &[]), Err(ConfigError::NoRoom(9)));
        assert_eq!(
            space.add_bar(1, 0x1000, BarKind::Registers, 0),
            Err(ConfigError::BadBar(1))
        );
        assert_eq!(
            space.add_bar(0, 0x1001, BarKind::Registers, 0),
            Err(ConfigError::BadBar(0))
        );
        assert_eq!(
            space.add_bar(0, 0x1000, BarKind::Registers, 0x800),
            Err(ConfigError::Misaligned(0))
        );
        assert_eq!(space.add_bar(0, 0x1000, BarKind::Registers, 0), Ok(()));
        assert_eq!(
            space.add_bar(0, 0x1000, BarKind::Registers, 0),
            Err(ConfigError::BadBar(0))
        );
    }
}
