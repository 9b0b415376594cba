//! Feeds kernels with valid headers, an initrd and any command line to the loader, in machines of any size. Asserts
//! that the zero page or the start info describes memory, initrd and command line as they are, that the initrd lies as
//! high as it can, and that KASLR stays in memory.

#![no_main]

use arbitrary::Arbitrary;
use husk_fuzz::kernels::{BASE, FIRST_SEGMENT, elf, header, load, packed_block};
use husk_vmm::boot::BootError;
use husk_vmm::boot::testing::{LOAD, Machine, NOTE, Segment, bzimage, note};
use husk_vmm::layout;
use husk_vmm::vcpu::entry::CpuEntry;
use libfuzzer_sys::fuzz_target;
use linux_loader::loader::bootparam::boot_params;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    kernel: Kernel,
    memory: Size,
    initrd: Option<u16>,
    command_line: Vec<Word<'a>>,
    long: Option<u16>,
    seed: [u64; 2],
}

#[derive(Arbitrary, Debug)]
enum Kernel {
    BzImage {
        sectors: u8,
        addr_max: u32,
        init_size: u32,
        line_max: u32,
        packed: bool,
    },
    Elf {
        pvh: bool,
        bss: u32,
    },
}

/// Sizes below and above the hole for devices.
#[derive(Arbitrary, Debug)]
enum Size {
    Pages(u16),
    Gib(u8),
}

#[derive(Arbitrary, Debug)]
enum Word<'a> {
    Known(u8),
    Text(&'a str),
}

const WORDS: [&str; 12] = [
    "panic=3",
    "panic=",
    "quiet",
    "nokaslr",
    "mem=1G",
    "--",
    "\"",
    "\"a b\"",
    "x=\"a -- b\"",
    "\t",
    "memmap=1M",
    "ro",
];

impl Size {
    fn bytes(&self) -> u64 {
        match *self {
            Self::Pages(pages) => layout::MIN_MEMORY + u64::from(pages) * 4096,
            Self::Gib(gib) => u64::from(1 + gib % 8) << 30,
        }
    }
}

const TEXT: [u8; 512] = [0x90; 512];

impl Kernel {
    /// The image, and the end of the memory that it needs.
    fn build(&self) -> (Vec<u8>, u64) {
        match *self {
            Self::BzImage {
                sectors,
                addr_max,
                init_size,
                line_max,
                packed,
            } => {
                let mut header = header();
                header.setup_sects = sectors % 40;
                header.initrd_addr_max = addr_max;
                header.init_size = init_size % (16 << 20);
                header.cmdline_size = line_max;
                let mut protected = vec![0x90; 0x400];
                if packed {
                    let len = TEXT.len() as u64;
                    let text = Segment {
                        kind: LOAD,
                        offset: FIRST_SEGMENT as u64,
                        address: BASE,
                        in_file: len,
                        in_memory: len,
                    };
                    let head = elf(BASE, FIRST_SEGMENT as u64 + len, &[text]);
                    let block = packed_block(&head, FIRST_SEGMENT, &[&TEXT[..], &[0; 8]].concat());
                    let mut payload = vec![0x02, 0x21, 0x4c, 0x18];
                    payload.extend((block.len() as u32).to_le_bytes());
                    payload.extend(block);
                    payload.extend(((FIRST_SEGMENT + TEXT.len() + 8) as u32).to_le_bytes());
                    (header.payload_offset, header.payload_length) = (0x400, payload.len() as u32);
                    protected.extend(payload);
                }
                protected.resize(protected.len().next_multiple_of(16), 0);
                header.syssize = (protected.len() / 16) as u32;
                let end = (layout::HIMEM + protected.len() as u64).max(BASE + u64::from(header.init_size));
                (bzimage(&header, &protected), end)
            }
            Self::Elf { pvh, bss } => {
                let notes = note(
                    b"Xen\0",
                    if pvh { 18 } else { 6 },
                    &(BASE as u32 + 16).to_le_bytes(),
                );
                let start = 64 + 2 * 56;
                let in_memory = TEXT.len() as u64 + u64::from(bss % (20 << 20));
                let segments = [
                    Segment {
                        kind: LOAD,
                        offset: start,
                        address: BASE,
                        in_file: TEXT.len() as u64,
                        in_memory,
                    },
                    Segment {
                        kind: NOTE,
                        offset: start + TEXT.len() as u64,
                        address: 0,
                        in_file: notes.len() as u64,
                        in_memory: notes.len() as u64,
                    },
                ];
                let image = [&elf(BASE, 0, &segments)[..], &TEXT, &notes].concat();
                (image, BASE + in_memory)
            }
        }
    }

    fn initrd_top(&self) -> u64 {
        match self {
            Self::BzImage { addr_max, .. } => u64::from(*addr_max) + 1,
            Self::Elf { .. } => u64::MAX,
        }
    }

    fn line_max(&self) -> usize {
        let limit = layout::COMMAND_LINE_MAX - 1;
        match self {
            Self::BzImage { line_max, .. } => limit.min(*line_max as usize),
            Self::Elf { .. } => limit,
        }
    }
}

/// The initrd and the memory map that the kernel is told.
type Told = ((u64, u64), Vec<(std::ops::Range<u64>, bool)>);

fn zero_page(machine: &Machine) -> Told {
    let params: boot_params = machine.object(layout::ZERO_PAGE);
    let header = params.hdr;
    let (magic, line, data) = (header.header, header.cmd_line_ptr, header.setup_data);
    assert_eq!(
        (magic, u64::from(line), data),
        (0x5372_6448, layout::COMMAND_LINE, 0)
    );
    let rsdp = params.acpi_rsdp_addr;
    assert_eq!(rsdp, layout::ACPI.start);
    let table = params.e820_table;
    let entry = |entry: &linux_loader::loader::bootparam::boot_e820_entry| {
        let (start, size, kind) = (entry.addr, entry.size, entry.r#type);
        (start..start + size, kind == 1)
    };
    let map = table[..params.e820_entries.into()].iter().map(entry).collect();
    (
        (u64::from(header.ramdisk_image), u64::from(header.ramdisk_size)),
        map,
    )
}

fn start_info(machine: &Machine) -> Told {
    let word = |at: u64| machine.object::<u32>(layout::PVH_INFO + at);
    let long = |at: u64| machine.object::<u64>(layout::PVH_INFO + at);
    assert_eq!((word(0), word(4), word(8)), (0x336e_c578, 1, 0));
    assert_eq!((long(24), long(32)), (layout::COMMAND_LINE, layout::ACPI.start));
    let initrd = match word(12) {
        0 => (0, 0),
        _ => (machine.object(long(16)), machine.object(long(16) + 8)),
    };
    let entries = (0..u64::from(word(48))).map(|at| long(40) + 24 * at);
    let map = entries.map(|at| {
        let [start, size] = [0, 8].map(|field| machine.object::<u64>(at + field));
        (start..start + size, machine.object::<u32>(at + 16) == 1)
    });
    (initrd, map.collect())
}

fuzz_target!(|input: Input<'_>| {
    let mut line = String::new();
    for word in &input.command_line {
        line += match word {
            Word::Known(word) => WORDS[usize::from(*word) % WORDS.len()],
            Word::Text(text) => text,
        };
        line.push(' ');
    }
    if let Some(len) = input.long {
        line += &"x".repeat(len.into());
    }
    let (image, kernel_end) = input.kernel.build();
    let machine = Machine::new(input.memory.bytes());
    let low = machine.layout.low_ram_end();
    let initrd: Option<Vec<u8>> = input
        .initrd
        .map(|len| (0..len).map(|at| (at / 7) as u8 | 1).collect());
    let loaded = load(&machine, &image, initrd.as_deref(), line.clone(), input.seed);

    let top = input.kernel.initrd_top().min(low);
    let place = initrd
        .as_ref()
        .map(|initrd| top.checked_sub(initrd.len() as u64).map(|at| at & !0xfff));
    let fits = place.map(|at| at.filter(|at| *at >= kernel_end));
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(BootError::NoRoom {
            what: "the kernel", ..
        }) => return assert!(kernel_end > low),
        Err(BootError::NoRoom { .. }) => return assert_eq!(fits, Some(None)),
        Err(BootError::CommandLine { length, limit }) => {
            return assert!(limit == input.kernel.line_max() && length > limit && length <= line.len() + 8);
        }
        Err(BootError::CommandLineNul) => return assert!(line.contains('\0')),
        Err(error) => panic!("{error}"),
    };
    assert!(kernel_end <= low);

    let text = machine.bytes(layout::COMMAND_LINE, layout::COMMAND_LINE_MAX as u64);
    let end = text.iter().position(|byte| *byte == 0).expect("it ends");
    assert!(end <= input.kernel.line_max());
    let text = std::str::from_utf8(&text[..end]).expect("text");
    let added = text.strip_prefix("panic=1").map(str::trim_start);
    assert!(
        text == line || added == Some(line.trim()) || added == Some(line.trim_end()),
        "{text:?}"
    );

    let (rip, (told, map)) = match loaded.entry {
        CpuEntry::Linux64 { rip } => (rip, zero_page(&machine)),
        CpuEntry::Pvh { rip } => (rip, start_info(&machine)),
    };
    assert!((layout::HIMEM..low).contains(&rip));
    assert_eq!(map, layout::memory_map(&machine.layout));
    match (initrd, fits) {
        (Some(initrd), Some(Some(at))) => {
            assert_eq!(told.1, initrd.len() as u64);
            assert!(told.1 == 0 || told.0 == at);
            assert!(machine.bytes(told.0, told.1) == initrd, "the initrd is whole");
        }
        (None, None) => assert_eq!(told, (0, 0)),
        other => panic!("{other:?}"),
    }
    if let Kernel::BzImage {
        packed: true,
        init_size,
        ..
    } = input.kernel
    {
        let base = rip & !0x1f_ffff;
        // Unpacked: all that the kernel needs lies below the initrd.
        if rip != layout::HIMEM + 0x200 {
            let limit = if told.1 > 0 { told.0 } else { low };
            assert!(
                base >= BASE && base + u64::from(init_size % (16 << 20)) <= limit,
                "{rip:#x}"
            );
            assert_eq!(machine.bytes(base, TEXT.len() as u64), TEXT);
        }
    }
});
