//! A PCI bus with a host bridge and the NIC, reached by the ports 0xCF8 and 0xCFC (PCI local bus 3.0, section 3.2.2.3).

use std::ops::Range;

/// Ports of the configuration space.
pub const PORTS: Range<u16> = 0xcf8..0xd00;
const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const ENABLE: u32 = 1 << 31;

/// Registers of a function.
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const CLASS: usize = 0x09;
const BAR0: usize = 0x10;
const BAR1: usize = 0x14;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const MSIX: usize = 0x40;

const STATUS_CAPABILITIES: u16 = 1 << 4;
const COMMAND_BITS: u16 = 0x0407;
const MSIX_ID: u8 = 0x11;
const MSIX_CONTROL_BITS: u16 = 0xc000;
const MSIX_ENABLE: u16 = 1 << 15;
const HOST_BRIDGE: [u8; 3] = [0, 0, 6];
const ETHERNET: [u8; 3] = [0, 0, 2];

/// Bytes of the NIC's I/O BAR.
pub const REGISTERS: u16 = 64;
/// Offset of the pending bits in the NIC's memory BAR, which has the MSI-X table at its start.
const PENDING_BITS: u32 = 0x800;
/// Number of MSI-X vectors.
pub const VECTORS: usize = 3;

/// The configuration space of a function.
#[derive(Debug)]
struct Function {
    values: [u8; 256],
    writable: [u8; 256],
}

impl Function {
    fn new(vendor: u16, device: u16, class: [u8; 3]) -> Self {
        let mut function = Self {
            values: [0; 256],
            writable: [0; 256],
        };
        function.set(0, &vendor.to_le_bytes());
        function.set(2, &device.to_le_bytes());
        function.set(CLASS, &class);
        function
    }

    fn set(&mut self, at: usize, bytes: &[u8]) {
        self.values[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn allow(&mut self, at: usize, bits: &[u8]) {
        self.writable[at..at + bits.len()].copy_from_slice(bits);
    }

    fn word(&self, at: usize) -> u32 {
        u32::from(self.values[at])
            | u32::from(self.values[at + 1]) << 8
            | u32::from(self.values[at + 2]) << 16
            | u32::from(self.values[at + 3]) << 24
    }
}

/// The bus. The NIC is device 1.
#[derive(Debug)]
pub struct Bus {
    address: u32,
    functions: [Function; 2],
}

impl Bus {
    /// The bus as firmware leaves it, with BARs that do not overlap guest memory.
    pub fn new() -> Self {
        let mut nic = Function::new(0x1af4, 0x1000, ETHERNET);
        nic.set(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        nic.allow(COMMAND, &COMMAND_BITS.to_le_bytes());
        nic.set(BAR0, &0xc001_u32.to_le_bytes());
        nic.allow(BAR0, &(!u32::from(REGISTERS - 1)).to_le_bytes());
        nic.set(BAR1, &0xe000_0000_u32.to_le_bytes());
        nic.allow(BAR1, &0xffff_f000_u32.to_le_bytes());
        nic.set(SUBSYSTEM, &[0xf4, 0x1a, 1, 0]);
        nic.set(CAPABILITIES, &[MSIX as u8]);
        nic.set(MSIX, &[MSIX_ID, 0, VECTORS as u8 - 1, 0]);
        nic.allow(MSIX + 2, &MSIX_CONTROL_BITS.to_le_bytes());
        // Both are in BAR 1.
        nic.set(MSIX + 4, &1_u32.to_le_bytes());
        nic.set(MSIX + 8, &(PENDING_BITS | 1).to_le_bytes());
        Self {
            address: 0,
            functions: [Function::new(0x1b36, 0x0008, HOST_BRIDGE), nic],
        }
    }

    /// Base of the NIC's registers.
    pub fn registers(&self) -> u16 {
        self.functions[1].word(BAR0) as u16 & !(REGISTERS - 1)
    }

    /// Base of the NIC's MSI-X table.
    pub fn table(&self) -> u64 {
        u64::from(self.functions[1].word(BAR1))
    }

    /// True if the NIC signals by MSI-X.
    pub fn msix(&self) -> bool {
        self.functions[1].word(MSIX) >> 16 & u32::from(MSIX_ENABLE) != 0
    }

    /// Reads `data.len()` bytes from one of [`PORTS`].
    pub fn read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        if port == ADDRESS && data.len() == 4 {
            data.copy_from_slice(&self.address.to_le_bytes());
        } else if let Some((function, at)) = self.selected(port, data.len()) {
            data.copy_from_slice(&self.functions[function].values[at..at + data.len()]);
        }
    }

    /// Writes `data` to one of [`PORTS`].
    pub fn write(&mut self, port: u16, data: &[u8]) {
        if let (ADDRESS, Ok(address)) = (port, data.try_into()) {
            self.address = u32::from_le_bytes(address);
        } else if let Some((function, at)) = self.selected(port, data.len()) {
            let Function { values, writable } = &mut self.functions[function];
            for (place, byte) in (at..).zip(data) {
                values[place] = values[place] & !writable[place] | byte & writable[place];
            }
        }
    }

    /// The function and the register that the data ports lead to.
    fn selected(&self, port: u16, length: usize) -> Option<(usize, usize)> {
        let at = usize::from(port.checked_sub(DATA)?) + (self.address & 0xfc) as usize;
        let device = (self.address >> 8 & 0xffff) as usize;
        let found =
            self.address & ENABLE != 0 && device.is_multiple_of(8) && device / 8 < self.functions.len();
        (found && at + length <= 256).then_some((device / 8, at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(bus: &mut Bus, device: u32, register: u32) {
        bus.write(ADDRESS, &(ENABLE | device << 11 | register).to_le_bytes());
    }

    #[test]
    fn a_driver_finds_the_nic_and_sizes_its_bars() {
        let mut bus = Bus::new();
        let mut word = [0; 4];
        for (device, wanted) in [(0, 0x0008_1b36), (1, 0x1000_1af4), (2, u32::MAX)] {
            select(&mut bus, device, 0);
            bus.read(DATA, &mut word);
            assert_eq!(u32::from_le_bytes(word), wanted);
        }
        for (register, wanted) in [(0x10, 0xffff_ffc1), (0x14, 0xffff_f000), (0x18, 0)] {
            select(&mut bus, 1, register);
            bus.write(DATA, &[0xff; 4]);
            bus.read(DATA, &mut word);
            assert_eq!(u32::from_le_bytes(word), wanted);
        }
    }

    #[test]
    fn an_access_beyond_the_space_is_ignored() {
        let mut bus = Bus::new();
        let mut word = [0; 4];
        select(&mut bus, 1, 0xfc);
        bus.read(DATA + 2, &mut word);
        assert_eq!(word, [0xff; 4]);
        bus.write(0xcff, &[0; 4]);
        assert!(!bus.msix());
    }
}
