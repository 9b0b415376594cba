//! Unpacks and places a kernel as its own decompressor does (arch/x86/boot/compressed/{misc,kaslr}.c): segments at
//! randomised physical and virtual base addresses (KASLR), relocations applied, the entry point in the kernel proper.

use std::ops::Range;

use linux_loader::loader::bootparam::setup_header;

use super::elf::{half, word};
use super::unpack;

/// Virtual address of the kernel's image mapping (`__START_KERNEL_map`). Relocations name addresses within 2 GiB of it.
const START_KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// Part of the mapping that a kernel with KASLR may use (`KERNEL_IMAGE_SIZE`).
const KERNEL_IMAGE_SIZE: u64 = 1 << 30;
/// Flag of the boot protocol's `loadflags`: the kernel's addresses are randomised.
const KASLR_FLAG: u8 = 1 << 1;
/// File offset of the first segment in Linux's builds. A kernel unpacked this far below its base need not be moved.
const FIRST_SEGMENT: u64 = 2 << 20;
/// Limit for the relocations of a kernel, in bytes; Debian's have about one MiB.
const MAX_RELOCATIONS: usize = 32 << 20;

/// Random numbers for the physical and the virtual base address.
pub(super) type KaslrSeed = [u64; 2];

/// Base addresses to randomise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KaslrMode {
    Off,
    /// The virtual base: the command line has parameters about physical memory.
    VirtualOnly,
    Full,
}

/// Unpacks the bzImage that is loaded at `load` into memory above itself and below `limit`. `low` is guest memory from
/// address 0. Returns the entry point's address and sets the KASLR flag of `header`. Returns `None` and leaves the
/// bzImage as it was if this kernel's own decompressor must unpack it.
pub(super) fn unpack(
    low: &mut [u8],
    load: u64,
    limit: u64,
    kaslr: KaslrMode,
    seed: KaslrSeed,
    header: &mut setup_header,
) -> Option<u64> {
    let payload = unpack::payload(low, load, header)?;
    let place = KernelPlacement::choose(header, limit, kaslr, seed)?;
    let (packed, free) = low.split_at_mut_checked(payload.end)?;
    let free_from = packed.len() as u64;
    let packed = &packed[payload];

    let image_at = [place.base - FIRST_SEGMENT, place.base]
        .into_iter()
        .find(|at| *at >= free_from)?;
    let free = free.get_mut(usize::try_from(image_at - free_from).ok()?..)?;
    let size = unpack::unpacked_size(packed)?;
    if image_at.checked_add(size as u64)? > limit {
        return None;
    }
    let image = free.get_mut(..size)?;
    unpack::unpack(packed, image)?;
    let vmlinux = Vmlinux::parse(image, &place.linked)?;

    // `kernel` starts at the base, `gap` bytes after `image_at`.
    let gap = usize::try_from(place.base - image_at).ok()?;
    for segment in &vmlinux.segments {
        let (from, to) = (segment.file.clone(), gap + segment.memory.start);
        let zeros = to + from.len()..gap + segment.memory.end;
        free.copy_within(from, to);
        free.get_mut(zeros)?.fill(0);
    }
    let kernel = free.get_mut(gap..)?;
    if let Some(relocations) = &vmlinux.relocations {
        relocations.apply(kernel, place.virtual_offset);
        if kaslr != KaslrMode::Off {
            header.loadflags |= KASLR_FLAG;
        }
    }
    Some(place.base + (vmlinux.entry - place.linked.start))
}

/// Addresses of a kernel.
#[derive(Debug, PartialEq, Eq)]
struct KernelPlacement {
    /// Physical addresses that the kernel is linked for, up to the end of the memory it needs before it reads its map.
    linked: Range<u64>,
    /// Physical address of the kernel's start.
    base: u64,
    /// Offset added to the kernel's virtual addresses, if it has relocations.
    virtual_offset: u64,
}

impl KernelPlacement {
    fn choose(header: &setup_header, limit: u64, kaslr: KaslrMode, seed: KaslrSeed) -> Option<Self> {
        let start = header.pref_address;
        let linked = start..start.checked_add(u64::from(header.init_size))?;
        let alignment = u64::from(header.kernel_alignment);
        let aligned =
            alignment.is_power_of_two() && alignment >= FIRST_SEGMENT && start.is_multiple_of(alignment);
        if header.relocatable_kernel == 0
            || !aligned
            || start < FIRST_SEGMENT
            || linked.end > KERNEL_IMAGE_SIZE
        {
            return None;
        }
        let room = limit.checked_sub(linked.end)?;
        let steps = |seed: u64, room: u64| seed % (room / alignment + 1) * alignment;
        let physical = if kaslr == KaslrMode::Full {
            steps(seed[0], room)
        } else {
            0
        };
        let virtual_offset = match kaslr {
            KaslrMode::Off => 0,
            _ => steps(seed[1], KERNEL_IMAGE_SIZE - linked.end),
        };
        Some(Self {
            base: start + physical,
            linked,
            virtual_offset,
        })
    }
}

/// A loadable segment: its range in the file, and in memory relative to the kernel's start.
#[derive(Debug)]
struct Segment {
    file: Range<usize>,
    memory: Range<usize>,
}

/// An unpacked kernel, checked and ready to be placed.
#[derive(Debug)]
struct Vmlinux {
    segments: Vec<Segment>,
    relocations: Option<Relocations>,
    entry: u64,
}

impl Vmlinux {
    /// Parses an unpacked kernel. Returns `None` if it does not have the form that Linux's build gives it.
    fn parse(image: &[u8], linked: &Range<u64>) -> Option<Self> {
        if image.len() < 64
            || !image.starts_with(b"\x7fELF\x02\x01")
            || half(image, 18) != 62
            || half(image, 54) != 56
        {
            return None;
        }
        let table = usize::try_from(word(image, 32)).ok()?;
        let table = image.get(table..table.checked_add(56 * usize::from(half(image, 56)))?)?;
        let mut segments = Vec::new();
        let mut done = 0;
        for program in table.chunks_exact(56).filter(|p| p.starts_with(&[1, 0, 0, 0])) {
            let [offset, paddr, in_file, in_memory] = [8, 24, 32, 40].map(|at| word(program, at));
            if paddr < linked.start || paddr.checked_add(in_memory)? > linked.end || in_file > in_memory {
                return None;
            }
            let memory = paddr - linked.start..paddr - linked.start + in_memory;
            // Segments ascend and only move down, so that none is overwritten before it is moved.
            if memory.start < done || memory.start.checked_add(FIRST_SEGMENT)? > offset {
                return None;
            }
            done = memory.end;
            let file = offset..offset.checked_add(in_file)?;
            let file = usize::try_from(file.start).ok()?..usize::try_from(file.end).ok()?;
            image.get(file.clone())?;
            segments.push(Segment {
                file,
                memory: memory.start as usize..memory.end as usize,
            });
        }
        let entry = word(image, 24);
        if segments.is_empty() || !linked.contains(&entry) {
            return None;
        }
        let end = word(image, 40).checked_add(u64::from(half(image, 58)) * u64::from(half(image, 60)))?;
        let relocations = match image.get(usize::try_from(end).ok()?..)? {
            [] => None,
            appended => Some(Relocations::parse(appended, linked)?),
        };
        Some(Self {
            segments,
            relocations,
            entry,
        })
    }
}

/// Offsets from the kernel's start of the addresses that depend on the virtual base.
#[derive(Debug, Default, PartialEq, Eq)]
struct Relocations {
    add64: Vec<usize>,
    subtract32: Vec<usize>,
    add32: Vec<usize>,
}

impl Relocations {
    /// Parses lists of sign-extended addresses, each after a zero: 64-bit, inverse 32-bit (until Linux 6.14), 32-bit.
    fn parse(appended: &[u8], linked: &Range<u64>) -> Option<Self> {
        if !appended.len().is_multiple_of(4) || appended.len() > MAX_RELOCATIONS {
            return None;
        }
        let mut lists: Vec<Vec<usize>> = Vec::new();
        for word in appended.chunks_exact(4) {
            let word = i32::from_le_bytes(word.try_into().ok()?);
            if word == 0 {
                if lists.len() == 3 {
                    return None;
                }
                lists.push(Vec::new());
                continue;
            }
            let target = (i64::from(word) as u64).wrapping_sub(START_KERNEL_MAP);
            if target < linked.start || target >= linked.end - 8 {
                return None;
            }
            lists.last_mut()?.push((target - linked.start) as usize);
        }
        let mut lists = lists.into_iter();
        match (lists.next(), lists.next(), lists.next(), lists.next()) {
            (Some(add64), Some(add32), None, None) => Some(Self {
                add64,
                add32,
                subtract32: Vec::new(),
            }),
            (Some(add64), Some(subtract32), Some(add32), None) => Some(Self {
                add64,
                subtract32,
                add32,
            }),
            _ => None,
        }
    }

    fn apply(&self, kernel: &mut [u8], offset: u64) {
        for &at in &self.add64 {
            if let Some(bytes) = kernel.get_mut(at..).and_then(|k| k.first_chunk_mut()) {
                *bytes = u64::from_le_bytes(*bytes).wrapping_add(offset).to_le_bytes();
            }
        }
        let offset = offset as u32;
        for (list, offset) in [(&self.subtract32, offset.wrapping_neg()), (&self.add32, offset)] {
            for &at in list {
                if let Some(bytes) = kernel.get_mut(at..).and_then(|k| k.first_chunk_mut()) {
                    *bytes = u32::from_le_bytes(*bytes).wrapping_add(offset).to_le_bytes();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
