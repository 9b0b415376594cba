//! ELF kernels, with and without a PVH entry note.

use super::super::testing::{LOAD, NOTE, Segment, elf_headers, note};
use super::*;

/// An ELF file: header, program headers, then `contents`; offsets of segments count from the contents.
pub fn elf(entry: u64, segments: &[Segment], contents: &[u8]) -> Vec<u8> {
    let start = 64 + 56 * segments.len() as u64;
    let mut segments = segments.to_vec();
    for segment in &mut segments {
        segment.offset = segment.offset.wrapping_add(start);
    }
    [&elf_headers(entry, 0, 0, &segments)[..], contents].concat()
}

const AT: u64 = 0x20_0000;

fn code() -> Segment {
    Segment {
        kind: LOAD,
        offset: 0,
        address: AT,
        in_file: 8192,
        in_memory: 8192,
    }
}

fn plain(change: impl FnOnce(&mut Segment)) -> Vec<u8> {
    let mut segment = code();
    change(&mut segment);
    elf(AT, &[segment], &pattern(5, 8192))
}

fn pvh(entry: u32) -> Vec<u8> {
    // As in Linux, other notes come first.
    let notes = [
        note(b"GNU\0", 3, &[1; 20]),
        note(b"Xen\0", 6, b"linux\0"),
        note(b"Xen\0", 18, &entry.to_le_bytes()),
    ]
    .concat();
    let contents = [pattern(5, 8192), notes.clone()].concat();
    let len = notes.len() as u64;
    let notes = Segment {
        kind: NOTE,
        offset: 8192,
        address: 0,
        in_file: len,
        in_memory: len,
    };
    elf(AT, &[code(), notes], &contents)
}

#[test]
fn without_a_note_it_starts_at_its_entry_with_a_zero_page() {
    let machine = Machine::new(64 * MIB);
    let loaded = machine.load(&plain(|_| ()), Some(&[1, 2, 3]), "quiet").unwrap();
    assert_eq!(loaded.entry, CpuEntry::Linux64 { rip: AT });
    assert_eq!(machine.bytes(AT, 8192), pattern(5, 8192));
    let params: linux_loader::loader::bootparam::boot_params = machine.object(layout::ZERO_PAGE);
    let (magic, size, line) = (
        params.hdr.header,
        params.hdr.ramdisk_size,
        params.hdr.cmd_line_ptr,
    );
    assert_eq!(
        (magic, size, u64::from(line)),
        (0x5372_6448, 3, layout::COMMAND_LINE)
    );
    let (at, rsdp) = (params.hdr.ramdisk_image, params.acpi_rsdp_addr);
    assert_eq!((u64::from(at), rsdp), (64 * MIB - 4096, layout::ACPI.start));
}

#[test]
fn with_a_note_it_gets_start_info() {
    for (memory, initrd) in [(64 * MIB, None), (5u64 << 30, Some(pattern(2, 5000)))] {
        let machine = Machine::new(memory);
        let loaded = machine
            .load(&pvh(AT as u32 + 16), initrd.as_deref(), "panic=7")
            .unwrap();
        assert_eq!(loaded.entry, CpuEntry::Pvh { rip: AT + 16 });
        let word = |at: u64| machine.object::<u32>(layout::PVH_INFO + at);
        let long = |at: u64| machine.object::<u64>(layout::PVH_INFO + at);
        assert_eq!(
            (word(0), word(4), word(8)),
            (0x336e_c578, 1, 0),
            "magic, version, flags"
        );
        assert_eq!((long(24), long(32)), (layout::COMMAND_LINE, layout::ACPI.start));
        assert_eq!(machine.command_line(), "panic=7");
        assert_eq!(word(12), u32::from(initrd.is_some()), "modules");
        if let Some(initrd) = &initrd {
            let module = |at: u64| machine.object::<u64>(long(16) + at);
            let expected = (layout::LOW_RAM_END - 5000) & !0xfff;
            assert_eq!([0, 8, 16, 24].map(module), [expected, 5000, 0, 0]);
            assert!(machine.bytes(expected, 5000) == *initrd);
        } else {
            assert_eq!(long(16), 0);
        }
        let entries: Vec<_> = (0..u64::from(word(48)))
            .map(|i| {
                let at = long(40) + i * 24;
                let (start, size): (u64, u64) = (machine.object(at), machine.object(at + 8));
                let (kind, reserved): (u32, u32) = (machine.object(at + 16), machine.object(at + 20));
                assert_eq!(reserved, 0);
                (start..start + size, kind == 1)
            })
            .collect();
        assert_eq!(entries, layout::memory_map(&machine.layout));
        assert_eq!(word(52), 0);
    }
}

#[test]
fn memory_that_only_the_running_kernel_fills_counts() {
    let machine = Machine::new(64 * MIB);
    let initrd = pattern(1, 4096);
    let bss = |end: u64| plain(|s| s.in_memory = end - AT);
    machine.load(&bss(64 * MIB - 4096), Some(&initrd), "").unwrap();
    let error = machine
        .load(&bss(64 * MIB - 4095), Some(&initrd), "")
        .unwrap_err();
    assert!(
        matches!(
            error,
            BootError::NoRoom {
                what: "the initrd",
                ..
            }
        ),
        "{error}"
    );
    let error = machine.load(&bss(64 * MIB + 1), None, "").unwrap_err();
    assert!(
        matches!(
            error,
            BootError::NoRoom {
                what: "the kernel",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn other_machines_files_are_no_kernels() {
    for (at, value) in [(4, 1), (5, 2), (18, 3), (18, 183)] {
        let mut image = plain(|_| ());
        image[at] = value;
        let error = Machine::new(64 * MIB).load(&image, None, "").unwrap_err();
        assert!(matches!(error, BootError::NotAKernel(_)), "{error}");
    }
}

fn refused(image: &[u8]) -> String {
    let error = Machine::new(64 * MIB).load(image, None, "").unwrap_err();
    assert!(matches!(error, BootError::BadKernel { .. }), "{error}");
    error
        .to_string()
        .strip_prefix("given kernel cannot be loaded: ")
        .unwrap()
        .to_owned()
}

#[test]
fn invalid_headers_are_refused_with_the_reason() {
    assert_eq!(refused(&plain(|s| s.in_file = 8193)), "a segment is cut off");
    assert_eq!(refused(&plain(|s| s.in_file = u64::MAX)), "a segment is cut off");
    assert_eq!(
        refused(&plain(|s| s.offset = u64::MAX - 200)),
        "a segment is cut off"
    );
    assert_eq!(
        refused(&plain(|s| s.in_memory = 1)),
        "a segment is larger in the file than in memory"
    );
    let low = refused(&plain(|s| s.address = layout::ACPI.start));
    assert_eq!(low, "a segment lies below 1 MiB, where its boot parameters go");
    let wraps = Machine::new(64 * MIB).load(&plain(|s| s.address = u64::MAX - 100), None, "");
    assert!(matches!(wraps, Err(BootError::NoRoom { .. })));

    assert_eq!(refused(&plain(|_| ())[..63]), "its header is cut off");
    let mut image = plain(|_| ());
    image[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(refused(&image), "its program headers are cut off");
    let many = vec![code(); 65];
    assert!(refused(&elf(AT, &many, &pattern(5, 8192))).contains("more program headers"));
}

/// 64 segments that all load one part of a large file would keep the loader busy for 16 GiB, as notes of
/// nothing would: one step for each 12 bytes.
#[test]
fn work_is_bounded_by_the_files_size() {
    let overlapping = vec![code(); 64];
    assert!(refused(&elf(AT, &overlapping, &pattern(5, 8192))).contains("segments overlap"));
    let empty = [0; 1 << 20];
    let notes = Segment {
        kind: NOTE,
        offset: 0,
        address: 0,
        in_file: 1 << 20,
        in_memory: 1 << 20,
    };
    assert!(refused(&elf(AT, &[code(), notes], &empty)).contains("notes are longer"));
}

#[test]
fn an_entry_outside_the_loaded_segments_is_refused() {
    let at = |entry| elf(entry, &[code()], &pattern(5, 8192));
    for entry in [AT + 8192, 63 * MIB, 1 << 40, u64::MAX] {
        assert!(
            refused(&at(entry)).contains("is not in what was loaded"),
            "{entry:#x}"
        );
    }
    assert_eq!(
        refused(&pvh(0x9_0000)),
        "its entry point 0x90000 is not in what was loaded"
    );
    assert!(refused(&pvh(u32::MAX)).contains("0xffffffff"));
    assert!(
        refused(&elf(AT, &[], &[])).contains("is not in what was loaded"),
        "nothing is"
    );
}
