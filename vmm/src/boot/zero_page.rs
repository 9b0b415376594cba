//! Linux's zero page (Documentation/arch/x86/zero-page.rst).

use husk_devices::GuestMemMmap;
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::layout::{self, Layout};

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
/// "Undefined" boot loader (Documentation/arch/x86/boot.rst).
const LOADER: u8 = 0xff;
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448;

/// The header of a kernel that brings none: an ELF file without a PVH note.
pub fn header_for_elf() -> setup_header {
    setup_header {
        boot_flag: BOOT_FLAG,
        header: HEADER_MAGIC,
        kernel_alignment: 0x100_0000,
        ..Default::default()
    }
}

/// Writes the zero page for a kernel with `header`.
pub fn write(
    mem: &GuestMemMmap,
    layout: &Layout,
    header: setup_header,
    initrd: Option<(u64, u64)>,
) -> Result<(), GuestMemoryError> {
    let mut params = boot_params {
        hdr: header,
        acpi_rsdp_addr: layout::ACPI.start,
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER;
    params.hdr.cmd_line_ptr = layout::COMMAND_LINE as u32;
    params.hdr.setup_data = 0;
    let (at, size) = initrd.unwrap_or_default();
    (params.hdr.ramdisk_image, params.hdr.ramdisk_size) = (at as u32, size as u32);
    let map = layout::memory_map(layout);
    for (entry, (range, ram)) in params.e820_table.iter_mut().zip(&map) {
        *entry = boot_e820_entry {
            addr: range.start,
            size: range.end - range.start,
            r#type: if *ram { E820_RAM } else { E820_RESERVED },
        };
    }
    params.e820_entries = map.len() as u8;
    mem.write_obj(params, GuestAddress(layout::ZERO_PAGE))
}
