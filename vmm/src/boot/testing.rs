//! Guest memory to load kernels into, and kernels built here after the cited documents, for tests and fuzz targets.

use std::ops::Range;

use husk_devices::{GuestMem, GuestMemMmap};
use linux_loader::loader::bootparam::setup_header;
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestAddressSpace};

use super::{BootError, KernelSource, LoadedKernel, load, load_with};
use crate::layout::{self, Layout};

/// The ACPI and SMBIOS tables.
const TABLES: Range<u64> = layout::ACPI.start..layout::SMBIOS.end;
const MARK: u8 = 0xa5;

/// Program header of a segment that is loaded.
pub const LOAD: u32 = 1;
/// Program header of notes.
pub const NOTE: u32 = 4;

/// Guest memory with marks in place of the tables, which no kernel may overwrite.
#[derive(Debug)]
pub struct Machine {
    /// The address map.
    pub layout: Layout,
    memory: GuestMem,
}

impl Machine {
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
        // Unlike a machine's, this memory is unmapped when it is dropped.
        let memory = GuestMem::new(GuestMemMmap::from_ranges(&ranges).expect("memory"));
        let marks = vec![MARK; (TABLES.end - TABLES.start) as usize];
        memory
            .memory()
            .write_slice(&marks, GuestAddress(TABLES.start))
            .expect("the tables are in memory");
        Self { layout, memory }
    }

    /// Loads a kernel.
    ///
    /// # Errors
    /// The kernel is refused.
    ///
    /// # Panics
    /// If the tables are overwritten.
    pub fn load_source(&self, source: &KernelSource) -> Result<LoadedKernel, BootError> {
        self.with_marks(load(source, &self.memory.memory(), &self.layout))
    }

    /// The same with these random numbers for the physical and the virtual base address.
    ///
    /// # Errors
    /// The kernel is refused.
    ///
    /// # Panics
    /// If the tables are overwritten.
    pub fn load_with_seed(&self, source: &KernelSource, seed: [u64; 2]) -> Result<LoadedKernel, BootError> {
        self.with_marks(load_with(source, &self.memory.memory(), &self.layout, || {
            Ok(seed)
        }))
    }

    fn with_marks(&self, loaded: Result<LoadedKernel, BootError>) -> Result<LoadedKernel, BootError> {
        let tables = self.bytes(TABLES.start, TABLES.end - TABLES.start);
        assert!(tables.iter().all(|byte| *byte == MARK), "tables are overwritten");
        loaded
    }

    /// Bytes of memory.
    ///
    /// # Panics
    /// If they are not in memory.
    #[must_use]
    pub fn bytes(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let read = self.memory.memory().read_slice(&mut bytes, GuestAddress(at));
        read.expect("an address in memory");
        bytes
    }

    /// An object in memory.
    ///
    /// # Panics
    /// If it is not in memory.
    #[must_use]
    pub fn object<T: ByteValued>(&self, at: u64) -> T {
        let object = self.memory.memory().read_obj(GuestAddress(at));
        object.expect("an address in memory")
    }
}

/// The setup header of a bzImage of Linux 6 (Documentation/arch/x86/boot.rst).
#[must_use]
pub fn linux_setup_header() -> setup_header {
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
        pref_address: 0x100_0000,
        init_size: 0x10_0000,
        ..Default::default()
    }
}

/// A bzImage: the setup sectors with `header`, then `protected`.
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
    /// [`LOAD`], [`NOTE`] or another type.
    pub kind: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Physical address.
    pub address: u64,
    /// Length in the file.
    pub in_file: u64,
    /// Length in memory.
    pub in_memory: u64,
}

/// The headers of an ELF file. `sections` is the offset of the section headers, of which there are none. The virtual
/// address of a segment is `virtual_offset` above the physical one.
#[must_use]
pub fn elf_headers(entry: u64, sections: u64, virtual_offset: u64, segments: &[Segment]) -> Vec<u8> {
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
            virtual_offset.wrapping_add(segment.address),
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

/// Unpacks a bzImage's payload into `out`, which has the unpacked size. Returns `None` if the result has another size,
/// or the payload is damaged or of an unknown format.
#[must_use]
pub fn unpack(payload: &[u8], out: &mut [u8]) -> Option<()> {
    super::unpack::unpack(payload, out)
}
