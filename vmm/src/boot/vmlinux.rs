//! Placing an unpacked kernel as its decompressor would (arch/x86/boot/compressed/{misc,kaslr}.c): segments
//! at a physical and a virtual base drawn by lot, relocations applied, the first instruction in the kernel.

use std::ops::Range;

use husk_devices::GuestMemMmap;
use linux_loader::loader::bootparam::setup_header;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::elf::{half, word};

/// Where the kernel's image is mapped; relocations name virtual addresses below 2 GiB from there.
const START_KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// How much of it a kernel with address-space randomisation may use.
const KERNEL_IMAGE_SIZE: u64 = 1 << 30;
/// Boot protocol: tells the kernel that its addresses were drawn by lot.
const KASLR_FLAG: u8 = 1 << 1;
const PROGRAM_HEADERS_MAX: usize = 64;

/// Random numbers for the physical and the virtual base.
pub(super) type Lots = [u64; 2];

/// What may be randomised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Randomise {
    Nothing,
    /// The virtual base only: the command line speaks of physical memory.
    Virtual,
    Both,
}

struct Segment<'a> {
    paddr: u64,
    bytes: &'a [u8],
}

/// Addresses, as sign-extended 32-bit words, to which the virtual offset is added or from which it is taken.
#[derive(Default)]
struct Relocations<'a> {
    add64: &'a [u8],
    subtract32: &'a [u8],
    add32: &'a [u8],
}

/// An unpacked kernel, checked and ready to be placed.
pub(super) struct Vmlinux<'a> {
    segments: Vec<Segment<'a>>,
    relocations: Option<Relocations<'a>>,
    entry: u64,
    /// Physical addresses it was linked for, to the end of all it needs at first.
    linked: Range<u64>,
    alignment: u64,
}

impl<'a> Vmlinux<'a> {
    /// Takes apart what a bzImage with `header` unpacked to; none if it is not what Linux's build makes.
    pub fn parse(image: &'a [u8], header: &setup_header) -> Option<Self> {
        let start = header.pref_address;
        let linked = start..start.checked_add(u64::from(header.init_size))?;
        let alignment = u64::from(header.kernel_alignment);
        if image.len() < 64 || !image.starts_with(b"\x7fELF\x02\x01") || half(image, 18) != 62 {
            return None;
        }
        if !alignment.is_power_of_two()
            || alignment < 1 << 21
            || !start.is_multiple_of(alignment)
            || start == 0
        {
            return None;
        }
        let count = usize::from(half(image, 56));
        let table = slice(image, word(image, 32), 56 * count as u64)?;
        if count > PROGRAM_HEADERS_MAX || half(image, 54) != 56 {
            return None;
        }
        let mut segments = Vec::new();
        for program in table.chunks_exact(56).filter(|p| p.starts_with(&[1, 0, 0, 0])) {
            let [offset, paddr, in_file, in_memory] = [8, 24, 32, 40].map(|at| word(program, at));
            let end = paddr.checked_add(in_memory)?;
            if paddr < linked.start || end > linked.end || in_file > in_memory {
                return None;
            }
            segments.push(Segment {
                paddr,
                bytes: slice(image, offset, in_file)?,
            });
        }
        let entry = word(image, 24);
        if segments.is_empty() || !linked.contains(&entry) {
            return None;
        }
        let elf_end = word(image, 40).checked_add(u64::from(half(image, 58)) * u64::from(half(image, 60)))?;
        let appended = image.get(usize::try_from(elf_end).ok()?..)?;
        let relocations = match appended {
            [] => None,
            _ => Some(Relocations::parse(appended).filter(|r| r.inside(&linked))?),
        };
        Some(Self {
            segments,
            relocations,
            entry,
            linked,
            alignment,
        })
    }

    /// The physical address up to which memory is needed at least.
    pub fn end(&self) -> u64 {
        self.linked.end
    }

    /// Writes the kernel to memory below `limit`, which is not below [`Vmlinux::end`]; returns its first
    /// instruction's address, and sets what `header` has to tell it.
    pub fn place(
        &self,
        mem: &GuestMemMmap,
        limit: u64,
        randomise: Randomise,
        lots: Lots,
        header: &mut setup_header,
    ) -> Result<u64, GuestMemoryError> {
        let size = self.linked.end - self.linked.start;
        let room = limit.saturating_sub(self.linked.end);
        let steps = |lot: u64, room: u64| lot % (room / self.alignment + 1) * self.alignment;
        let randomise = if self.relocations.is_some() {
            randomise
        } else {
            Randomise::Nothing
        };
        let physical = if randomise == Randomise::Both {
            steps(lots[0], room)
        } else {
            0
        };
        let virtual_ = match (randomise, KERNEL_IMAGE_SIZE.checked_sub(self.linked.start + size)) {
            (Randomise::Virtual | Randomise::Both, Some(room)) => steps(lots[1], room),
            _ => 0,
        };
        for segment in &self.segments {
            mem.write_slice(segment.bytes, GuestAddress(segment.paddr + physical))?;
        }
        if let Some(relocations) = self.relocations.as_ref().filter(|_| virtual_ != 0) {
            relocations.apply(mem, physical, virtual_)?;
        }
        if randomise != Randomise::Nothing {
            header.loadflags |= KASLR_FLAG;
        }
        Ok(self.entry + physical)
    }
}

fn slice(image: &[u8], offset: u64, len: u64) -> Option<&[u8]> {
    let start = usize::try_from(offset).ok()?;
    image.get(start..start.checked_add(usize::try_from(len).ok()?)?)
}

impl<'a> Relocations<'a> {
    /// Lists of words after zeros: 64-bit ones, inverse 32-bit ones (not since Linux 6.15), 32-bit ones.
    fn parse(appended: &'a [u8]) -> Option<Self> {
        if !appended.len().is_multiple_of(4) {
            return None;
        }
        let mut lists = Vec::new();
        let mut start = None;
        for at in (0..appended.len()).step_by(4) {
            if appended[at..at + 4] == [0; 4] {
                lists.extend(start.map(|start| &appended[start..at]));
                start = Some(at + 4);
            } else if start.is_none() || lists.len() > 3 {
                return None;
            }
        }
        lists.extend(start.map(|start| &appended[start..]));
        match lists[..] {
            [add64, add32] => Some(Self {
                add64,
                add32,
                ..Self::default()
            }),
            [add64, subtract32, add32] => Some(Self {
                add64,
                subtract32,
                add32,
            }),
            _ => None,
        }
    }

    /// Whether all of them name addresses in the kernel.
    fn inside(&self, linked: &Range<u64>) -> bool {
        let mut all = [self.add64, self.subtract32, self.add32]
            .into_iter()
            .flat_map(targets);
        all.all(|at| at >= linked.start && at < linked.end - 8)
    }

    fn apply(&self, mem: &GuestMemMmap, physical: u64, virtual_: u64) -> Result<(), GuestMemoryError> {
        for at in targets(self.add64).map(|at| GuestAddress(at + physical)) {
            mem.write_obj(mem.read_obj::<u64>(at)?.wrapping_add(virtual_), at)?;
        }
        let offset = virtual_ as u32;
        for (list, offset) in [(self.subtract32, offset.wrapping_neg()), (self.add32, offset)] {
            for at in targets(list).map(|at| GuestAddress(at + physical)) {
                mem.write_obj(mem.read_obj::<u32>(at)?.wrapping_add(offset), at)?;
            }
        }
        Ok(())
    }
}

/// The physical addresses, as linked, that a list of relocations names.
fn targets(list: &[u8]) -> impl Iterator<Item = u64> {
    list.chunks_exact(4).map(|word| {
        let word = i32::from_le_bytes([word[0], word[1], word[2], word[3]]);
        (i64::from(word) as u64).wrapping_sub(START_KERNEL_MAP)
    })
}

#[cfg(test)]
mod tests;
