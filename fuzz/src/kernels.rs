//! Kernels: bzImages and ELF files, and the sizes that break them.

use arbitrary::Arbitrary;
use husk_vmm::boot::testing::{Machine, Segment, elf_headers, linux_setup_header};
use husk_vmm::boot::{BootError, KernelSource, LoadedKernel};
use linux_loader::loader::bootparam::setup_header;

use crate::images::file;

/// Offset of the first segment in an unpacked kernel, and its virtual address's distance from the physical one.
pub const FIRST_SEGMENT: usize = 2 << 20;
/// Virtual address of the kernel's image mapping.
pub const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// Physical address that the kernels built here are linked for.
pub const BASE: u64 = 4 << 20;

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

/// Loads a kernel into `machine`.
///
/// # Errors
/// The kernel is refused.
pub fn load(
    machine: &Machine,
    kernel: &[u8],
    initrd: Option<&[u8]>,
    command_line: String,
    seed: [u64; 2],
) -> Result<LoadedKernel, BootError> {
    let source = KernelSource::Kernel {
        kernel: file(kernel),
        initrd: initrd.map(file),
        command_line,
    };
    machine.load_with_seed(&source, seed)
}

/// A header as Linux 6 has it, for a kernel at [`BASE`].
#[must_use]
pub fn header() -> setup_header {
    setup_header {
        pref_address: BASE,
        init_size: 0x20_0000,
        ..linux_setup_header()
    }
}

/// The headers of an ELF file whose segments are in the kernel's image mapping.
#[must_use]
pub fn elf(entry: u64, sections: u64, segments: &[Segment]) -> Vec<u8> {
    elf_headers(entry, sections, KERNEL_MAP, segments)
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
