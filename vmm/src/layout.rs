//! The guest-physical address map. One place, because ACPI, e820, PCI and the loader must agree.

use std::ops::Range;

/// Where low memory ends and the 32-bit hole begins.
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// 32-bit PCI memory window.
pub const PCI_MMIO32: Range<u64> = 0xc000_0000..0xe000_0000;
/// ECAM of bus 0. One bus is all there is, which spares the guest 255 scans.
pub const ECAM: Range<u64> = 0xe000_0000..0xe010_0000;
/// I/O APIC registers (in KVM).
pub const IOAPIC: u64 = 0xfec0_0000;
/// Local APIC registers (in KVM).
pub const LAPIC: u64 = 0xfee0_0000;
/// Identity-map page and three TSS pages that Intel's KVM needs, just under the 16 MiB kept for firmware.
pub const IDENTITY_MAP: u64 = 0xfeff_c000;
/// See [`IDENTITY_MAP`].
pub const TSS: u64 = 0xfeff_d000;
/// Where high memory begins.
pub const HIGH_RAM: u64 = 1 << 32;

/// GDT for the first instruction.
pub const GDT: u64 = 0x500;
/// IDT (empty).
pub const IDT: u64 = 0x520;
/// PVH start info.
pub const PVH_INFO: u64 = 0x6000;
/// Linux zero page.
pub const ZERO_PAGE: u64 = 0x7000;
/// Initial page tables: PML4, PDPT, four page directories.
pub const PAGE_TABLES: u64 = 0x9000;
/// Command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Longest command line, with its terminating zero.
pub const COMMAND_LINE_MAX: usize = 0x1_0000;
/// End of conventional memory, where the extended BIOS data area would be.
pub const EBDA: u64 = 0x9_fc00;
/// ACPI tables, RSDP first (found by scan as well as by pointer).
pub const ACPI: Range<u64> = 0xe_0000..0xf_0000;
/// SMBIOS entry point and structures, found by scan.
pub const SMBIOS: Range<u64> = 0xf_0000..RESET_VECTOR;
/// Where a PC's BIOS is entered in real mode. Linux jumps there to reboot a hardware-reduced ACPI machine
/// without EFI, because it takes such a machine for one with EFI and then finds there is none.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// Where kernels go.
pub const HIMEM: u64 = 0x10_0000;

/// Least guest memory that is worth starting, in bytes.
pub const MIN_MEMORY: u64 = 16 << 20;

/// What depends on the guest's memory size and the host's address width.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// RAM ranges, ascending.
    pub ram: Vec<Range<u64>>,
    /// 64-bit PCI memory window. Between high RAM and its start, memory can be hot-added later.
    pub pci_mmio64: Range<u64>,
}

/// Guest memory that has no place in the address map.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LayoutError {
    /// Less than [`MIN_MEMORY`].
    #[error("guest memory of {0} bytes is below the minimum of {MIN_MEMORY}")]
    TooSmall(u64),
    /// Not a whole number of 4 KiB pages.
    #[error("guest memory of {0} bytes is not a multiple of 4096")]
    Unaligned(u64),
    /// More than the host can address.
    #[error(
        "guest memory of {size} bytes does not fit a host with {bits} physical address bits (limit {limit})"
    )]
    TooLarge {
        /// Bytes asked for.
        size: u64,
        /// MAXPHYADDR.
        bits: u8,
        /// Most that fits.
        limit: u64,
    },
}

impl Layout {
    /// Places `memory` bytes of RAM on a host with `phys_bits` physical address bits (36 to 52).
    pub fn new(memory: u64, phys_bits: u8) -> Result<Self, LayoutError> {
        if memory < MIN_MEMORY {
            return Err(LayoutError::TooSmall(memory));
        }
        if !memory.is_multiple_of(4096) {
            return Err(LayoutError::Unaligned(memory));
        }
        // The upper half of the space starts with the PCI window, clear of what some hosts reserve at the top.
        let top = 1u64 << phys_bits.clamp(36, 52);
        let pci_mmio64 = top / 2..top / 2 + top / 8;
        let limit = pci_mmio64.start - HIGH_RAM + LOW_RAM_END;
        if memory > limit {
            return Err(LayoutError::TooLarge {
                size: memory,
                bits: phys_bits,
                limit,
            });
        }
        let low = memory.min(LOW_RAM_END);
        let high = (memory > low).then(|| HIGH_RAM..HIGH_RAM + (memory - low));
        let ram = std::iter::once(0..low).chain(high).collect();
        Ok(Self { ram, pci_mmio64 })
    }

    /// The end of RAM below 4 GiB.
    pub fn low_ram_end(&self) -> u64 {
        self.ram[0].end
    }
}

/// One e820 or PVH memory-map entry: range and whether it is RAM (else reserved).
pub fn memory_map(layout: &Layout) -> Vec<(Range<u64>, bool)> {
    let mut map = vec![
        (0..EBDA, true),
        (EBDA..HIMEM, false),
        (HIMEM..layout.low_ram_end(), true),
        (ECAM, false),
    ];
    map.extend(layout.ram[1..].iter().map(|r| (r.clone(), true)));
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_goes_below_the_hole_first() {
        let small = Layout::new(512 << 20, 40).unwrap();
        assert_eq!((small.ram.len(), small.low_ram_end()), (1, 512 << 20));
        let large = Layout::new(5 << 30, 48).unwrap();
        assert_eq!(large.ram, [0..3 << 30, 4 << 30..6 << 30]);
        assert_eq!(large.pci_mmio64.start, 1 << 47);
    }

    #[test]
    fn sizes_that_cannot_work_are_refused() {
        assert!(matches!(Layout::new(1 << 20, 40), Err(LayoutError::TooSmall(_))));
        assert!(matches!(
            Layout::new((64 << 20) + 1, 40),
            Err(LayoutError::Unaligned(_))
        ));
        assert!(matches!(
            Layout::new(1 << 40, 40),
            Err(LayoutError::TooLarge { .. })
        ));
        assert!(Layout::new(400 << 30, 40).is_ok());
    }

    #[test]
    fn nothing_overlaps() {
        for (memory, bits) in [(64u64 << 20, 36), (3 << 30, 39), (5 << 30, 40), (100 << 30, 46)] {
            let layout = Layout::new(memory, bits).unwrap();
            let mut map: Vec<_> = memory_map(&layout).into_iter().map(|(r, _)| r).collect();
            map.extend([
                PCI_MMIO32,
                IOAPIC..IOAPIC + 0x1000,
                LAPIC..LAPIC + 0x1000,
                IDENTITY_MAP..TSS + 0x3000,
            ]);
            map.push(layout.pci_mmio64.clone());
            map.sort_by_key(|r| r.start);
            assert!(map.windows(2).all(|w| w[0].end <= w[1].start), "{map:x?}");
        }
        const { assert!(PAGE_TABLES + 6 * 0x1000 <= COMMAND_LINE) };
        const { assert!(COMMAND_LINE + COMMAND_LINE_MAX as u64 <= EBDA) };
    }
}
