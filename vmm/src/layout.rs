//! The guest-physical address map, which ACPI, e820, PCI and the loader share.

use std::ops::Range;

/// End of low memory and start of the 32-bit hole.
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// 32-bit PCI memory window.
pub const PCI_MMIO32: Range<u64> = 0xc000_0000..0xe000_0000;
/// ECAM of bus 0, the only bus: with more, the guest would scan each.
pub const ECAM: Range<u64> = 0xe000_0000..0xe010_0000;
/// I/O APIC registers (in KVM).
pub const IOAPIC: u64 = 0xfec0_0000;
/// Local APIC registers (in KVM).
pub const LAPIC: u64 = 0xfee0_0000;
/// Identity-map page, which KVM needs on Intel hosts, below the 16 MiB reserved for firmware.
pub const IDENTITY_MAP: u64 = 0xfeff_c000;
/// Three TSS pages, which KVM needs on Intel hosts.
pub const TSS: u64 = 0xfeff_d000;
/// Start of high memory.
pub const HIGH_RAM: u64 = 1 << 32;

/// GDT at the entry point.
pub const GDT: u64 = 0x500;
/// IDT at the entry point (empty).
pub const IDT: u64 = 0x520;
/// PVH start info.
pub const PVH_INFO: u64 = 0x6000;
/// Linux zero page.
pub const ZERO_PAGE: u64 = 0x7000;
/// Initial page tables: PML4, PDPT, four page directories.
pub const PAGE_TABLES: u64 = 0x9000;
/// Command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Size limit of the command line in bytes, with its terminating zero.
pub const COMMAND_LINE_MAX: usize = 0x1_0000;
/// End of conventional memory, where the extended BIOS data area would be.
pub const EBDA: u64 = 0x9_fc00;
/// ACPI tables, RSDP first. Guests find it by a scan as well as by pointer.
pub const ACPI: Range<u64> = 0xe_0000..0xe_f000;
/// The machine's generation ID, [`GENERATION_ID_LEN`] bytes. It has a page of its own, and is not at the start of it,
/// where guests look for option ROMs.
pub const GENERATION_ID: u64 = 0xe_f010;
/// Length of the generation ID in bytes.
pub const GENERATION_ID_LEN: usize = 16;
/// SMBIOS entry point and structures, which guests find by a scan.
pub const SMBIOS: Range<u64> = 0xf_0000..RESET_VECTOR;
/// Entry point of a PC's BIOS in real mode. Linux jumps there to reboot a hardware-reduced ACPI machine without EFI: it
/// expects EFI on such a machine and falls back to the BIOS.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// Load address of kernels.
pub const HIMEM: u64 = 0x10_0000;

/// Minimum guest memory in bytes.
pub const MIN_MEMORY: u64 = 16 << 20;

/// The part of the map that depends on the guest's memory size and the host's address width.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// RAM ranges, ascending.
    pub ram: Vec<Range<u64>>,
    /// 64-bit PCI memory window. The addresses between high RAM and this window are reserved for memory hotplug.
    pub pci_mmio64: Range<u64>,
}

/// Guest memory does not fit the address map.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LayoutError {
    /// The size is below [`MIN_MEMORY`].
    #[error("guest memory of {0} bytes is below the minimum of {MIN_MEMORY}")]
    TooSmall(u64),
    /// The size is not a multiple of 4096.
    #[error("guest memory of {0} bytes is not a multiple of 4096")]
    Unaligned(u64),
    /// The host cannot address so much memory.
    #[error(
        "guest memory of {size} bytes does not fit a host with {bits} physical address bits (limit {limit})"
    )]
    TooLarge {
        /// Requested bytes.
        size: u64,
        /// MAXPHYADDR.
        bits: u8,
        /// Maximum in bytes.
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
        // The PCI window starts the upper half of the address space: some hosts reserve addresses at the top.
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

    /// End of RAM below 4 GiB.
    pub fn low_ram_end(&self) -> u64 {
        self.ram[0].end
    }
}

/// The e820 or PVH memory map: ranges, and true for RAM, false for reserved ranges.
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
    fn memory_fills_the_range_below_the_hole_first() {
        let small = Layout::new(512 << 20, 40).unwrap();
        assert_eq!((small.ram.len(), small.low_ram_end()), (1, 512 << 20));
        let large = Layout::new(5 << 30, 48).unwrap();
        assert_eq!(large.ram, [0..3 << 30, 4 << 30..6 << 30]);
        assert_eq!(large.pci_mmio64.start, 1 << 47);
    }

    #[test]
    fn invalid_sizes_are_refused() {
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
    fn ranges_do_not_overlap() {
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

    #[test]
    fn the_generation_id_is_aligned_in_a_reserved_page_of_its_own() {
        assert_eq!(GENERATION_ID % 8, 0);
        let page = GENERATION_ID & !0xfff..(GENERATION_ID & !0xfff) + 0x1000;
        assert!(GENERATION_ID + GENERATION_ID_LEN as u64 <= page.end);
        assert!(ACPI.end <= page.start && page.end <= SMBIOS.start);
        let map = memory_map(&Layout::new(MIN_MEMORY, 40).unwrap());
        let around: Vec<_> = map
            .iter()
            .filter(|(range, _)| range.start < page.end && page.start < range.end)
            .collect();
        assert!(
            matches!(&around[..], [(range, false)] if range.start <= page.start && page.end <= range.end),
            "{around:x?}"
        );
    }
}
