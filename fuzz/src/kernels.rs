//! Kernels: bzImages (Documentation/arch/x86/boot.rst of Linux) and ELF files, and memory to load them into.

use std::fs::File;

use arbitrary::Arbitrary;
use husk_devices::{GuestMem, GuestMemMmap};
use husk_vmm::boot::{BootError, KernelSource, LoadedKernel, load_with_seed};
use husk_vmm::layout::{self, Layout};
use linux_loader::loader::bootparam::setup_header;
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestAddressSpace};

use crate::images::file;

/// Offset of the first segment in an unpacked kernel, and its virtual address's distance from the physical one.
pub const FIRST_SEGMENT: usize = 2 << 20;
/// Virtual address of the kernel's image mapping.
pub const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// Physical address that the kernels built here are linked for.
pub const BASE: u64 = 4 << 20;

/// Program header of a segment that is loaded.
pub const LOAD: u32 = 1;
/// Program header of notes.
pub const NOTE: u32 = 4;

/// A word of the sizes that break sums.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Word {
    Small(u16),
    Mib(u8),
    Near(i8),
    Bit(u8),
    Top(u16),
    Any(u64),
}

impl Word {
    /// The word, or near `usual`.
    #[must_use]
    pub fn or(self, usual: u64) -> u64 {
        match self {
            Self::Small(word) => word.into(),
            Self::Mib(mib) => u64::from(mib) << 20,
            Self::Near(by) => usual.wrapping_add_signed(by.into()),
            Self::Bit(bit) => 1 << (bit % 64),
            Self::Top(below) => u64::MAX - u64::from(below),
            Self::Any(word) => word,
        }
    }
}

/// Memory with marks where the tables of the machine are, which no kernel may overwrite.
pub struct Memory {
    /// The address map.
    pub layout: Layout,
    /// The memory.
    pub memory: GuestMem,
}

const MARK: u8 = 0xa5;
const TABLES: std::ops::Range<u64> = layout::ACPI.start..layout::SMBIOS.end;

impl Memory {
    /// Memory of `bytes`.
    ///
    /// # Panics
    /// If it cannot be mapped.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let layout = Layout::new(bytes, 40).expect("a size that a machine can have");
        let ranges: Vec<_> = layout
            .ram
            .iter()
            .map(|range| (GuestAddress(range.start), (range.end - range.start) as usize))
            .collect();
        let memory = GuestMem::new(GuestMemMmap::from_ranges(&ranges).expect("memory"));
        let new = Self { layout, memory };
        let marks = vec![MARK; (TABLES.end - TABLES.start) as usize];
        let written = new
            .memory
            .memory()
            .write_slice(&marks, GuestAddress(TABLES.start));
        written.expect("the tables are in memory");
        new
    }

    /// Loads a kernel. An entry point is in memory.
    ///
    /// # Errors
    /// The kernel is refused.
    pub fn load(
        &self,
        kernel: &[u8],
        initrd: Option<&[u8]>,
        command_line: String,
        seed: [u64; 2],
    ) -> Result<LoadedKernel, BootError> {
        let source = KernelSource::Kernel {
            kernel: file(kernel),
            initrd: initrd.map(|initrd| -> File { file(initrd) }),
            command_line,
        };
        let loaded = load_with_seed(&source, &self.memory.memory(), &self.layout, seed);
        let tables = self.bytes(TABLES.start, TABLES.end - TABLES.start);
        assert!(
            tables.iter().all(|byte| *byte == MARK),
            "the tables are overwritten"
        );
        loaded
    }

    /// Bytes of memory.
    ///
    /// # Panics
    /// If they are not there.
    #[must_use]
    pub fn bytes(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let read = self.memory.memory().read_slice(&mut bytes, GuestAddress(at));
        read.expect("memory");
        bytes
    }

    /// An object in memory.
    ///
    /// # Panics
    /// If it is not there.
    #[must_use]
    pub fn object<T: ByteValued>(&self, at: u64) -> T {
        self.memory.memory().read_obj(GuestAddress(at)).expect("memory")
    }
}

/// The header that Linux 6 has.
#[must_use]
pub fn header() -> setup_header {
    setup_header {
        setup_sects: 1,
        boot_flag: 0xaa55,
        jump: 0x6aeb,
        header: 0x5372_6448,
        version: 0x20f,
        loadflags: 1,
        code32_start: 0x10_0000,
        initrd_addr_max: 0x7fff_ffff,
        kernel_alignment: 0x20_0000,
        relocatable_kernel: 1,
        min_alignment: 21,
        xloadflags: 1,
        cmdline_size: 2047,
        pref_address: BASE,
        init_size: 0x20_0000,
        ..Default::default()
    }
}

/// A bzImage of `header` and what follows the setup sectors.
#[must_use]
pub fn bzimage(header: &setup_header, protected: &[u8]) -> Vec<u8> {
    let sectors = match header.setup_sects {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let mut image = vec![0; 0x1f1];
    image.extend_from_slice(header.as_slice());
    image.resize((sectors + 1) * 512, 0);
    image.extend_from_slice(protected);
    image
}

/// One program header.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    pub kind: u32,
    pub offset: u64,
    pub address: u64,
    pub in_file: u64,
    pub in_memory: u64,
}

/// The headers of an ELF file. `sections` is the offset of the section headers, of which there are none.
#[must_use]
pub fn elf(entry: u64, sections: u64, segments: &[Segment]) -> Vec<u8> {
    let mut image = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    image.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [entry, 64, sections] {
        image.extend(word.to_le_bytes());
    }
    image.extend(0u32.to_le_bytes());
    for half in [64u16, 56, segments.len() as u16, 0, 0, 0] {
        image.extend(half.to_le_bytes());
    }
    for segment in segments {
        image.extend(segment.kind.to_le_bytes());
        image.extend(7u32.to_le_bytes());
        for word in [
            segment.offset,
            KERNEL_MAP.wrapping_add(segment.address),
            segment.address,
            segment.in_file,
            segment.in_memory,
            4096,
        ] {
            image.extend(word.to_le_bytes());
        }
    }
    image
}

/// A note of an ELF file.
#[must_use]
pub fn note(name: &[u8], kind: u32, value: &[u8]) -> Vec<u8> {
    let mut note = Vec::new();
    for word in [name.len() as u32, value.len() as u32, kind] {
        note.extend(word.to_le_bytes());
    }
    for part in [name, value] {
        note.extend(part);
        note.resize(note.len().next_multiple_of(4), 0);
    }
    note
}

/// Appends the length of a run to an LZ4 block, as far as it is not in the token.
fn more(block: &mut Vec<u8>, len: usize) {
    if let Some(mut rest) = len.checked_sub(15) {
        while rest >= 255 {
            block.push(255);
            rest -= 255;
        }
        block.push(rest as u8);
    }
}

/// An LZ4 block of `head`, of its last byte again up to `gap` bytes in all, and of `tail`.
#[must_use]
pub fn packed_block(head: &[u8], gap: usize, tail: &[u8]) -> Vec<u8> {
    let run = gap.saturating_sub(head.len() + 4);
    let mut block = vec![(head.len().min(15) << 4 | run.min(15)) as u8];
    more(&mut block, head.len());
    block.extend_from_slice(head);
    block.extend([1, 0]);
    more(&mut block, run);
    block.push((tail.len().min(15) << 4) as u8);
    more(&mut block, tail.len());
    block.extend_from_slice(tail);
    block
}
