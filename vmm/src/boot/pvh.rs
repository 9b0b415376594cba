//! PVH start info (Xen's docs/misc/pvh.pandoc, public/arch-x86/hvm/start_info.h, version 1).

use husk_devices::GuestMemMmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::layout::{self, Layout};

const MAGIC: u32 = 0x336e_c578;
const VERSION: u32 = 1;
/// Start info proper; module list and memory map follow it in the same page.
const INFO_LEN: u64 = 56;
const MODULE_LEN: u64 = 32;
const MEMORY_MAP: u64 = layout::PVH_INFO + INFO_LEN + MODULE_LEN;
const RAM: u32 = 1;
const RESERVED: u32 = 2;

/// Writes start info, the initrd as its one module, and the memory map.
pub fn write(
    mem: &GuestMemMmap,
    layout: &Layout,
    initrd: Option<(u64, u64)>,
) -> Result<(), GuestMemoryError> {
    let map = layout::memory_map(layout);
    let mut page = Vec::with_capacity(4096);
    let (modules, module_list) = if initrd.is_some() {
        (1u32, layout::PVH_INFO + INFO_LEN)
    } else {
        (0, 0)
    };
    for word in [MAGIC, VERSION, 0, modules] {
        page.extend(word.to_le_bytes());
    }
    for address in [module_list, layout::COMMAND_LINE, layout::ACPI.start, MEMORY_MAP] {
        page.extend(address.to_le_bytes());
    }
    for word in [map.len() as u32, 0] {
        page.extend(word.to_le_bytes());
    }
    let (at, size) = initrd.unwrap_or_default();
    for field in [at, size, 0, 0] {
        page.extend(field.to_le_bytes());
    }
    for (range, ram) in &map {
        page.extend(range.start.to_le_bytes());
        page.extend((range.end - range.start).to_le_bytes());
        for word in [if *ram { RAM } else { RESERVED }, 0] {
            page.extend(word.to_le_bytes());
        }
    }
    debug_assert!(page.len() <= 4096);
    mem.write_slice(&page, GuestAddress(layout::PVH_INFO))
}
