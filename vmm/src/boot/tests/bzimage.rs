//! The 64-bit boot protocol.

use linux_loader::loader::bootparam::boot_params;

use super::*;

fn reason(result: Result<LoadedKernel, BootError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn the_kernel_is_loaded_at_its_address_and_starts_at_its_64_bit_entry() {
    for sectors in [1, 0, 30] {
        let machine = Machine::new(64 * MIB);
        let loaded = machine
            .load(&bzimage(|h| h.setup_sects = sectors), None, "quiet")
            .unwrap();
        assert_eq!(loaded.entry, CpuEntry::Linux64 { rip: 0x10_0200 });
        assert_eq!(machine.bytes(0x10_0000, 64 << 10), pattern(7, 64 << 10));
        assert_eq!(machine.bytes(0x11_0000, 4096), vec![0; 4096]);
    }
    let machine = Machine::new(64 * MIB);
    let loaded = machine
        .load(&bzimage(|h| h.code32_start = 0x20_0000), None, "")
        .unwrap();
    assert_eq!(loaded.entry, CpuEntry::Linux64 { rip: 0x20_0200 });
}

#[test]
fn protocols_with_a_64_bit_entry_are_accepted() {
    let load = |version, xloadflags, loadflags| {
        let image = bzimage(|h| (h.version, h.xloadflags, h.loadflags) = (version, xloadflags, loadflags));
        Machine::new(64 * MIB).load(&image, None, "")
    };
    for version in [0x20c, 0x20d, 0x20f, 0x210] {
        assert!(load(version, 0x7f, 1).is_ok(), "{version:#x}");
    }
    for version in [0x1ff, 0x200, 0x206, 0x20b] {
        assert!(
            matches!(load(version, 1, 1), Err(BootError::BadKernel { .. })),
            "{version:#x}"
        );
    }
    assert!(reason(load(0x20b, 1, 1)).contains("boot protocol 0x20b has no 64-bit entry point"));
    assert!(reason(load(0x20f, 0, 1)).contains("no 64-bit entry point"));
    assert!(
        matches!(load(0x20f, 1, 0), Err(BootError::BadKernel { .. })),
        "a zImage, loaded low"
    );
}

#[test]
fn memory_that_the_kernel_needs_early_must_exist() {
    let fits = |change: fn(&mut setup_header)| match Machine::new(64 * MIB).load(&bzimage(change), None, "") {
        Ok(_) => true,
        Err(BootError::NoRoom { what, memory, .. }) => {
            assert_eq!((what, memory), ("the kernel", 64 * MIB));
            false
        }
        Err(e) => panic!("{e}"),
    };
    assert!(fits(|h| h.init_size = 48 << 20));
    assert!(!fits(|h| h.init_size = (48 << 20) + 1));
    assert!(!fits(|h| h.init_size = u32::MAX));
    assert!(!fits(|h| h.pref_address = u64::MAX));
    // Where there is no preferred address, the next multiple of the alignment.
    assert!(fits(
        |h| (h.pref_address, h.kernel_alignment, h.init_size) = (0, 32 << 20, 32 << 20)
    ));
    assert!(!fits(
        |h| (h.pref_address, h.kernel_alignment, h.init_size) = (0, 32 << 20, (32 << 20) + 1)
    ));
    assert!(fits(|h| h.kernel_alignment = 0));
    // The image alone is too large.
    let large = vec![0; 16 << 20];
    let image = [bzimage(|_| ()), large].concat();
    assert!(matches!(
        Machine::new(16 * MIB).load(&image, None, ""),
        Err(BootError::NoRoom { .. })
    ));
}

#[test]
fn a_truncated_kernel_is_refused() {
    let image = bzimage(|_| ());
    for len in [image.len() - 1, image.len() / 2, 1024 + 0x200] {
        let text = reason(Machine::new(64 * MIB).load(&image[..len], None, ""));
        let expected = format!(
            "given kernel cannot be loaded: it is cut off after {} of 65536 bytes",
            len - 1024
        );
        assert_eq!(text, expected);
    }
    assert!(matches!(
        Machine::new(64 * MIB).load(&image[..1000], None, ""),
        Err(BootError::BadKernel { .. })
    ));
    // A signature after the kernel is no part of it.
    let signed = [&image[..], &[1; 1500]].concat();
    Machine::new(64 * MIB).load(&signed, None, "").unwrap();
}

#[test]
fn a_file_that_is_no_kernel_is_refused() {
    for bytes in [&b""[..], b"#!/bin/sh\n", b"MZ", &[0; 5000]] {
        let error = Machine::new(64 * MIB).load(bytes, None, "").unwrap_err();
        assert!(matches!(error, BootError::NotAKernel(_)), "{error}");
        assert!(error.to_string().starts_with("given kernel is not a kernel"));
    }
    let kernel = file(b"");
    kernel.set_len(KERNEL_MAX + 1).unwrap();
    let source = KernelSource::Kernel {
        kernel,
        initrd: None,
        command_line: String::new(),
    };
    let error = Machine::new(64 * MIB)
        .load_source(&source)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("the kernel of 268435457 bytes is larger than 256 MiB"),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_initrd_is_as_high_as_kernel_and_memory_allow(
        size in prop_oneof![1usize..9000, 1usize..(5 << 20)],
        addr_max in prop_oneof![Just(0x7fff_ffffu32), 0u32..(20 << 20), Just(u32::MAX)],
        init_size in prop_oneof![Just(0x10_0000u32), 0u32..(15 << 20)],
    ) {
        let machine = Machine::new(16 * MIB);
        let image = bzimage(|h| {
            (h.initrd_addr_max, h.pref_address, h.init_size) = (addr_max, 2 * MIB, init_size);
        });
        let initrd = pattern(3, size);
        let kernel_end = 2 * MIB + u64::from(init_size);
        let top = (u64::from(addr_max) + 1).min(16 * MIB);
        let highest = top.checked_sub(size as u64).map(|at| at & !0xfff).filter(|at| *at >= kernel_end);
        match (machine.load(&image, Some(&initrd), ""), highest) {
            (Ok(_), Some(expected)) => {
                let params: boot_params = machine.object(layout::ZERO_PAGE);
                let (at, len) = (params.hdr.ramdisk_image, params.hdr.ramdisk_size);
                prop_assert_eq!((u64::from(at), len as usize), (expected, size));
                prop_assert!(machine.bytes(expected, size as u64) == initrd);
                let rest = 16 * MIB - (expected + size as u64);
                let above = machine.bytes(expected + size as u64, rest.min(8192));
                prop_assert!(above.iter().all(|b| *b == 0), "more than the initrd was written");
                let below = machine.bytes(expected - 4096, 4096);
                prop_assert!(below.iter().all(|b| *b == 0));
            }
            (Err(BootError::NoRoom { what, size: needed, .. }), None) => {
                let whose = if kernel_end > 16 * MIB { "the kernel" } else { "the initrd" };
                prop_assert_eq!(what, whose);
                prop_assert!(what == "the kernel" || needed == size as u64);
            }
            (result, expected) => prop_assert!(false, "{:?}, but {:x?}", result, expected),
        }
    }
}

#[test]
fn the_zero_page_describes_the_machine() {
    for memory in [64 * MIB, 5 << 30] {
        let machine = Machine::new(memory);
        let initrd = pattern(9, 12345);
        machine
            .load(&bzimage(|_| ()), Some(&initrd), "console=ttyS0 panic=0")
            .unwrap();
        let params: boot_params = machine.object(layout::ZERO_PAGE);
        let header = params.hdr;
        let (magic, flag, loader) = (header.header, header.boot_flag, header.type_of_loader);
        assert_eq!((magic, flag, loader), (0x5372_6448, 0xaa55, 0xff));
        let (version, alignment, size) = (header.version, header.kernel_alignment, header.cmdline_size);
        assert_eq!(
            (version, alignment, size),
            (0x20f, 0x20_0000, 2047),
            "what the kernel says of itself stays"
        );
        let (rsdp, pointer, setup_data) = (params.acpi_rsdp_addr, header.cmd_line_ptr, header.setup_data);
        assert_eq!(
            (rsdp, pointer, setup_data),
            (layout::ACPI.start, layout::COMMAND_LINE as u32, 0)
        );
        let high = (
            params.ext_cmd_line_ptr,
            params.ext_ramdisk_image,
            params.ext_ramdisk_size,
        );
        assert_eq!(high, (0, 0, 0), "upper halves of addresses");
        assert_eq!(machine.command_line(), "console=ttyS0 panic=0");

        let entries = params.e820_table;
        let entries: Vec<_> = entries[..params.e820_entries.into()]
            .iter()
            .map(|e| {
                let (start, size, kind) = (e.addr, e.size, e.r#type);
                (start..start + size, kind == 1)
            })
            .collect();
        assert_eq!(entries, layout::memory_map(&machine.layout));
        let ram: u64 = entries.iter().filter(|e| e.1).map(|(r, _)| r.end - r.start).sum();
        assert_eq!(
            memory - ram,
            layout::HIMEM - layout::EBDA,
            "all but the BIOS area"
        );
        assert!(entries.windows(2).all(|w| w[0].0.end <= w[1].0.start));
    }
}

#[test]
fn without_an_initrd_the_zero_page_names_none() {
    let machine = Machine::new(64 * MIB);
    machine
        .load(
            &bzimage(|h| (h.ramdisk_image, h.ramdisk_size, h.setup_data) = (1, 2, 3)),
            None,
            "",
        )
        .unwrap();
    let params: boot_params = machine.object(layout::ZERO_PAGE);
    let (at, size, data) = (
        params.hdr.ramdisk_image,
        params.hdr.ramdisk_size,
        params.hdr.setup_data,
    );
    assert_eq!((at, size, data), (0, 0, 0));
    assert_eq!(machine.command_line(), "panic=1");
}

#[test]
fn a_command_line_may_be_as_long_as_the_kernel_accepts() {
    let load = |limit: u32, len: usize| {
        let line = format!("panic=1 {}", "x".repeat(len - 8));
        let machine = Machine::new(64 * MIB);
        machine
            .load(&bzimage(|h| h.cmdline_size = limit), None, &line)
            .map(|_| machine.command_line().len())
    };
    assert!(matches!(load(2047, 2047), Ok(2047)));
    let error = reason(Machine::new(64 * MIB).load(&bzimage(|_| ()), None, &"x".repeat(2047)));
    assert_eq!(
        error, "kernel command line of 2055 bytes is longer than the 2047 that the kernel accepts",
        "with panic=1"
    );
    assert!(matches!(
        load(2047, 2048),
        Err(BootError::CommandLine {
            length: 2048,
            limit: 2047
        })
    ));
    // The machine's own limit, whatever the kernel says.
    assert!(matches!(load(u32::MAX, 0xffff), Ok(0xffff)));
    assert!(matches!(
        load(u32::MAX, 0x1_0000),
        Err(BootError::CommandLine { limit: 0xffff, .. })
    ));
    let machine = Machine::new(64 * MIB);
    assert!(matches!(
        machine.load(&bzimage(|_| ()), None, "quiet\0ro"),
        Err(BootError::CommandLineNul)
    ));
}
