//! A kernel that halts at its first instruction: guests of it are loaded and started as others, and then cost nothing.

use anyhow::{Context, Result, bail};
use object::LittleEndian;
use object::elf::{FileHeader64, PT_LOAD, ProgramHeader64};
use object::read::elf::{FileHeader, ProgramHeader};

type Elf = FileHeader64<LittleEndian>;
type Segment = ProgramHeader64<LittleEndian>;

/// Name and type of the note with the 32-bit entry point of PVH (Xen's docs/misc/pvh.pandoc).
const XEN: &[u8] = b"Xen";
const PHYS32_ENTRY: u32 = 18;
/// `hlt`, and a jump back to it. Interrupts are off at both entry points, so the jump is never reached.
const HALT: [u8; 3] = [0xf4, 0xeb, 0xfd];

/// Overwrites both entry points of an ELF kernel, that of PVH and the 64-bit one; returns their physical addresses.
///
/// # Errors
/// It is no 64-bit ELF file, or an entry point is missing.
pub fn halt(kernel: &mut [u8]) -> Result<[u64; 2]> {
    let [pvh, long] = entries(kernel).context("the kernel")?;
    for entry in [pvh, long] {
        let at = usize::try_from(offset(kernel, entry)?)?;
        kernel
            .get_mut(at..at + HALT.len())
            .context("the file is cut off")?
            .copy_from_slice(&HALT);
    }
    Ok([pvh, long])
}

fn entries(kernel: &[u8]) -> Result<[u64; 2]> {
    let elf = Elf::parse(kernel)?;
    let endian = elf.endian()?;
    let mut pvh = None;
    for segment in segments(kernel)? {
        let Some(mut notes) = segment.notes(endian, kernel)? else {
            continue;
        };
        while let Some(note) = notes.next()? {
            if note.name() == XEN && note.n_type(endian) == PHYS32_ENTRY {
                let bytes = note.desc().get(..4).context("the entry of PVH is too short")?;
                pvh = Some(u64::from(u32::from_le_bytes(bytes.try_into()?)));
            }
        }
    }
    Ok([pvh.context("it has no entry for PVH")?, elf.e_entry(endian)])
}

fn segments(kernel: &[u8]) -> Result<&[Segment]> {
    let elf = Elf::parse(kernel)?;
    Ok(elf.program_headers(elf.endian()?, kernel)?)
}

/// Offset in the file of the byte at a physical `address`.
fn offset(kernel: &[u8], address: u64) -> Result<u64> {
    let endian = LittleEndian;
    for segment in segments(kernel)? {
        let inside = address.checked_sub(segment.p_paddr(endian));
        let inside = inside.filter(|inside| *inside < segment.p_filesz(endian));
        if let (PT_LOAD, Some(inside)) = (segment.p_type(endian), inside) {
            return Ok(segment.p_offset(endian) + inside);
        }
    }
    bail!("no segment has the entry point {address:#x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOADED_AT: u64 = 0x100_0000;
    const CODE: usize = 0x200;

    /// An ELF file with a segment of code and one of notes; the entry points are 16 and 32 bytes into the code.
    fn kernel(note: u32) -> Vec<u8> {
        let mut file = vec![0; CODE + 64];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"\x7fELF\x02\x01\x01");
        put(16, &[2, 0, 0x3e, 0, 1]);
        put(24, &(LOADED_AT + 32).to_le_bytes());
        put(32, &64_u64.to_le_bytes());
        put(52, &[64, 0, 56, 0, 2, 0]);
        let mut segment = |index: usize, kind: u32, numbers: [u64; 4]| {
            put(64 + index * 56, &kind.to_le_bytes());
            let [offset, address, size, align] = numbers;
            for (field, number) in [(8, offset), (24, address), (32, size), (40, size), (48, align)] {
                put(64 + index * 56 + field, &number.to_le_bytes());
            }
        };
        segment(0, 1, [CODE as u64, LOADED_AT, 64, 0x1000]);
        segment(1, 4, [0x100, 0, 20, 4]);
        let entry = u32::try_from(LOADED_AT + 16).expect("it is low");
        for (index, word) in [4, 4, note].into_iter().enumerate() {
            put(0x100 + index * 4, &word.to_le_bytes());
        }
        put(0x10c, b"Xen\0");
        put(0x110, &entry.to_le_bytes());
        file
    }

    #[test]
    fn both_entry_points_halt() {
        let mut file = kernel(PHYS32_ENTRY);
        let entries = halt(&mut file).expect("a kernel");
        assert_eq!(entries, [LOADED_AT + 16, LOADED_AT + 32]);
        assert_eq!(file[CODE + 16..][..3], HALT);
        assert_eq!(file[CODE + 32..][..3], HALT);
        assert_eq!(file.iter().filter(|byte| **byte == HALT[0]).count(), 2);
    }

    #[test]
    fn other_files_are_refused() {
        let error = halt(&mut kernel(PHYS32_ENTRY + 1)).expect_err("no entry");
        assert!(format!("{error:#}").contains("no entry for PVH"), "{error:#}");
        let file = kernel(PHYS32_ENTRY);
        for length in [0, 20, 100, CODE + 17] {
            assert!(halt(&mut file[..length].to_vec()).is_err(), "{length}");
        }
    }
}
