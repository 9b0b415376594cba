//! Malicious kernels: loading fails, or the entry point lies in guest memory.

use super::super::testing::{LOAD, NOTE, Segment, note};
use super::elf::elf;
use super::*;

fn endures(kernel: &[u8], initrd: Option<&[u8]>) -> Result<(), TestCaseError> {
    let machine = Machine::new(16 * MIB);
    if let Ok(loaded) = machine.load(kernel, initrd, "quiet") {
        let (CpuEntry::Linux64 { rip } | CpuEntry::Pvh { rip }) = loaded.entry;
        prop_assert!((layout::HIMEM..16 * MIB).contains(&rip), "{:#x}", rip);
    }
    Ok(())
}

/// A word of the sizes that break sums.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0u64..0x4000,
        (0u64..64).prop_map(|bit| 1 << bit),
        (0u64..0x2000).prop_map(|n| u64::MAX - n),
        (0u64..64).prop_map(|n| n << 20),
    ]
}

fn segment() -> impl Strategy<Value = Segment> {
    let kind = prop_oneof![4 => Just(LOAD), 2 => Just(NOTE), 1 => any::<u32>()];
    (kind, word(), word(), word(), word()).prop_map(|(kind, offset, address, in_file, in_memory)| Segment {
        kind,
        offset,
        address,
        in_file,
        in_memory,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..4096), magic in 0..4u8) {
        let mut bytes = bytes;
        let (at, magic): (usize, &[u8]) = match magic {
            0 => (0, b"\x7fELF"),
            1 => (0, b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0"),
            2 => (0x202, b"HdrS\x0f\x02"),
            _ => (0, b""),
        };
        if bytes.len() >= at + magic.len() {
            bytes[at..at + magic.len()].copy_from_slice(magic);
        }
        endures(&bytes, None)?;
    }

    #[test]
    fn random_setup_headers(
        changes in prop::collection::vec((0usize..0x80, any::<u8>()), 1..6),
        cut in prop_oneof![3 => Just(usize::MAX), 1 => 0usize..70_000],
        initrd in prop::option::of(0usize..20_000),
    ) {
        let mut image = bzimage(|h| (h.pref_address, h.init_size) = (0x20_0000, 0x10_0000));
        for (at, value) in changes {
            image[0x1f1 + at] = value;
        }
        image.truncate(cut);
        let initrd = initrd.map(|len| pattern(1, len));
        endures(&image, initrd.as_deref())?;
    }

    #[test]
    fn random_setup_fields(
        code32_start in word(), pref in word(), init in word(), alignment in word(), addr_max in word(),
        syssize in word(), sectors in any::<u8>(), cmdline in word(),
    ) {
        let image = bzimage(|h| {
            h.code32_start = code32_start as u32;
            h.pref_address = pref;
            h.init_size = init as u32;
            h.kernel_alignment = alignment as u32;
            h.initrd_addr_max = addr_max as u32;
            h.syssize = syssize as u32;
            h.cmdline_size = cmdline as u32;
        });
        endures(&image, Some(&[0; 5000]))?;
        let mut image = image;
        image[0x1f1] = sectors;
        endures(&image, None)?;
    }

    #[test]
    fn random_program_headers(
        entry in word(),
        segments in prop::collection::vec(segment(), 0..6),
        contents in prop::collection::vec(any::<u8>(), 0..8192),
    ) {
        endures(&elf(entry, &segments, &contents), Some(&[0; 5000]))?;
    }

    #[test]
    fn random_notes(
        contents in prop::collection::vec(prop_oneof![Just(0u8), Just(4), Just(18), any::<u8>()], 0..2048),
    ) {
        let code = Segment { kind: LOAD, offset: 0, address: 0x20_0000, in_file: 0, in_memory: 4096 };
        let len = contents.len() as u64;
        let notes = Segment { kind: NOTE, offset: 0, address: 0, in_file: len, in_memory: len };
        endures(&elf(0x20_0000, &[code, notes], &contents), None)?;
    }

    #[test]
    fn changed_elf_files(changes in prop::collection::vec((0usize..300, any::<u8>()), 1..8)) {
        let code = Segment { kind: LOAD, offset: 0, address: 0x20_0000, in_file: 4096, in_memory: 8192 };
        let notes = note(b"Xen\0", 18, &0x20_0010u32.to_le_bytes());
        let len = notes.len() as u64;
        let described = Segment { kind: NOTE, offset: 0, address: 0, in_file: len, in_memory: len };
        let mut image = elf(0x20_0000, &[code, described], &[notes, pattern(1, 4096)].concat());
        for (at, value) in changes {
            image[at] = value;
        }
        endures(&image, None)?;
    }
}
