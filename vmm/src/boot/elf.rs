//! Checks the headers of an ELF kernel before linux-loader reads them: linux-loader trusts every length and count.

use std::io::{Read, Seek, SeekFrom};

use super::error::BootError;
use crate::layout;

/// Most program headers; Linux has five.
const PROGRAM_HEADERS_MAX: u16 = 64;
/// Most bytes of notes: the PVH note has 20, all of Linux's notes a few hundred.
const NOTES_MAX: u64 = 64 << 10;

const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const X86_64: u16 = 62;
const HEADER_LEN: usize = 64;
const PROGRAM_HEADER_LEN: usize = 56;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;

pub(super) fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8]
        .iter()
        .rev()
        .fold(0, |all, byte| all << 8 | u64::from(*byte))
}

pub(super) fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Checks the headers of `file`, which has `size` bytes, for guest memory that ends at `memory`.
pub(super) fn check<F: Read + Seek>(
    file: &mut F,
    size: u64,
    memory: u64,
    what: &str,
) -> Result<(), BootError> {
    let bad = |reason: &str| BootError::BadKernel {
        what: what.to_owned(),
        reason: reason.to_owned(),
    };
    let read = |source| BootError::Read {
        what: what.to_owned(),
        source,
    };
    if size < HEADER_LEN as u64 {
        return Err(bad("its header is cut off"));
    }
    let mut header = [0; HEADER_LEN];
    file.rewind()
        .and_then(|()| file.read_exact(&mut header))
        .map_err(read)?;
    if (header[4], header[5], half(&header, 18)) != (CLASS_64, LITTLE_ENDIAN, X86_64) {
        return Err(BootError::NotAKernel(what.to_owned()));
    }
    let (offset, len, count) = (word(&header, 32), half(&header, 54), half(&header, 56));
    if count > PROGRAM_HEADERS_MAX || usize::from(len) != PROGRAM_HEADER_LEN {
        return Err(bad("it has more program headers, or larger ones, than a kernel"));
    }
    let mut table = vec![0; usize::from(count) * PROGRAM_HEADER_LEN];
    if offset
        .checked_add(table.len() as u64)
        .is_none_or(|end| end > size)
    {
        return Err(bad("its program headers are cut off"));
    }
    file.seek(SeekFrom::Start(offset))
        .and_then(|_| file.read_exact(&mut table))
        .map_err(read)?;
    let (mut loaded, mut notes) = (0u64, 0u64);
    for program in table.chunks_exact(PROGRAM_HEADER_LEN) {
        let kind = u32::from_le_bytes([program[0], program[1], program[2], program[3]]);
        if kind != PT_LOAD && kind != PT_NOTE {
            continue;
        }
        let [from, to, in_file, in_memory] = [8, 24, 32, 40].map(|at| word(program, at));
        if from.checked_add(in_file).is_none_or(|end| end > size) {
            return Err(bad("a segment is cut off"));
        }
        if kind == PT_NOTE {
            notes = notes.saturating_add(in_file);
            continue;
        }
        loaded = loaded.saturating_add(in_file);
        if in_file > in_memory {
            return Err(bad("a segment is larger in the file than in memory"));
        }
        if in_file > 0 && to < layout::HIMEM {
            return Err(bad("a segment lies below 1 MiB, where its boot parameters go"));
        }
        if to.checked_add(in_memory).is_none_or(|end| end > memory) {
            return Err(BootError::NoRoom {
                what: "the kernel",
                size: in_memory,
                memory,
            });
        }
    }
    if loaded > size || notes > NOTES_MAX {
        return Err(bad(
            "its segments overlap, or its notes are longer than a kernel's",
        ));
    }
    file.rewind().map_err(read)
}
