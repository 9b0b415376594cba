//! Feeds bzImages, packed kernels with relocations, ELF files and any bytes behind a magic number to the loader of
//! kernels. Asserts that the entry point of a kernel which is loaded lies in guest memory, and that no kernel overwrites
//! the machine's tables.

#![no_main]

use arbitrary::Arbitrary;
use husk_fuzz::images::Value;
use husk_fuzz::kernels::{BASE, FIRST_SEGMENT, KERNEL_MAP, Word, elf, header, load, packed_block};
use husk_vmm::boot::testing::{LOAD, Machine, NOTE, Segment, bzimage, note};
use husk_vmm::layout;
use husk_vmm::vcpu::entry::CpuEntry;
use libfuzzer_sys::fuzz_target;
use linux_loader::loader::bootparam::setup_header;

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    kernel: Kernel<'a>,
    patches: Vec<(u16, Value)>,
    cut: Option<u16>,
    initrd: Option<u16>,
    command_line: CommandLine<'a>,
    seed: [u64; 2],
}

#[derive(Arbitrary, Debug)]
enum Kernel<'a> {
    Bytes {
        magic: u8,
        bytes: &'a [u8],
    },
    BzImage {
        header: Header,
        protected: &'a [u8],
    },
    Packed {
        header: Header,
        vmlinux: Vmlinux<'a>,
    },
    Elf {
        entry: Word,
        segments: Vec<(Kind, [Word; 4])>,
        notes: Vec<Note<'a>>,
        contents: &'a [u8],
    },
}

/// Changed fields.
#[derive(Arbitrary, Debug)]
struct Header {
    fields: Vec<(u8, Word)>,
}

#[derive(Arbitrary, Debug)]
struct Vmlinux<'a> {
    text: &'a [u8],
    /// Lists of relocations, each of offsets from the base.
    lists: Vec<Vec<Relocation>>,
    segment: Option<[Word; 4]>,
    second: Option<[Word; 4]>,
    entry: Option<Word>,
    sections: Option<Word>,
    /// The unpacked size that the payload says.
    size: Option<Word>,
    block: Vec<(u16, u8)>,
    blocks: u8,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Relocation {
    Near(u16),
    Any(u32),
}

#[derive(Arbitrary, Debug)]
enum Kind {
    Load,
    Note,
    Other(u32),
}

#[derive(Arbitrary, Debug)]
struct Note<'a> {
    xen: bool,
    kind: Option<u32>,
    value: &'a [u8],
}

#[derive(Arbitrary, Debug)]
enum CommandLine<'a> {
    Quiet,
    Plain,
    VirtualOnly,
    Text(&'a str),
}

const MEMORY: u64 = 16 << 20;

impl Header {
    fn change(&self, header: &mut setup_header) {
        for (field, word) in self.fields.iter().take(6) {
            match field % 14 {
                0 => header.setup_sects = word.or(1) as u8,
                1 => header.syssize = word.or(header.syssize.into()) as u32,
                2 => header.version = word.or(0x20f) as u16,
                3 => header.loadflags = word.or(1) as u8,
                4 => header.code32_start = word.or(0x10_0000) as u32,
                5 => header.initrd_addr_max = word.or(0x7fff_ffff) as u32,
                6 => header.kernel_alignment = word.or(0x20_0000) as u32,
                7 => header.relocatable_kernel = word.or(1) as u8,
                8 => header.xloadflags = word.or(1) as u16,
                9 => header.cmdline_size = word.or(2047) as u32,
                10 => header.pref_address = word.or(BASE),
                11 => header.init_size = word.or(0x20_0000) as u32,
                12 => header.payload_offset = word.or(header.payload_offset.into()) as u32,
                _ => header.payload_length = word.or(header.payload_length.into()) as u32,
            }
        }
    }
}

impl Vmlinux<'_> {
    /// The packed kernel.
    fn pack(&self) -> Vec<u8> {
        let text = &self.text[..self.text.len().min(2048)];
        let segment = |words: &[Word; 4], usual: [u64; 4]| {
            let [offset, address, in_file, in_memory] = std::array::from_fn(|at| words[at].or(usual[at]));
            Segment {
                kind: LOAD,
                offset,
                address,
                in_file,
                in_memory,
            }
        };
        let len = text.len() as u64;
        let usual = [FIRST_SEGMENT as u64, BASE, len, len + 100];
        let first = self.segment.unwrap_or([Word::Near(0); 4]);
        let mut segments = vec![segment(&first, usual)];
        if let Some(second) = &self.second {
            segments.push(segment(
                second,
                [usual[0] + len / 2, BASE + len + 100, len / 2, len],
            ));
        }
        let end = FIRST_SEGMENT as u64 + len;
        let entry = self.entry.map_or(BASE + 4, |entry| entry.or(BASE + 4));
        let sections = self.sections.map_or(end, |sections| sections.or(end));
        let mut tail = text.to_vec();
        for list in self.lists.iter().take(5) {
            tail.extend([0; 4]);
            for relocation in list.iter().take(64) {
                let word = match *relocation {
                    Relocation::Near(offset) => (KERNEL_MAP + BASE + u64::from(offset)) as u32,
                    Relocation::Any(word) => word,
                };
                tail.extend(word.to_le_bytes());
            }
        }
        let mut block = packed_block(&elf(entry, sections, &segments), FIRST_SEGMENT, &tail);
        for (at, byte) in self.block.iter().take(6) {
            let at = usize::from(*at) % block.len();
            block[at] = *byte;
        }
        let mut payload = vec![0x02, 0x21, 0x4c, 0x18];
        for _ in 0..=self.blocks % 3 / 2 {
            payload.extend((block.len() as u32).to_le_bytes());
            payload.extend_from_slice(&block);
        }
        let size = (FIRST_SEGMENT + tail.len()) as u64;
        let size = self.size.map_or(size, |word| word.or(size));
        payload.extend((size as u32).to_le_bytes());
        payload
    }
}

fn image(kernel: &Kernel<'_>) -> Vec<u8> {
    match kernel {
        Kernel::Bytes { magic, bytes } => {
            let (at, magic): (usize, &[u8]) = match magic % 4 {
                0 => (0, b"\x7fELF"),
                1 => (0, b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0"),
                2 => (0x202, b"HdrS\x0f\x02"),
                _ => (0, b""),
            };
            let mut image = bytes[..bytes.len().min(8192)].to_vec();
            if let Some(place) = image.get_mut(at..at + magic.len()) {
                place.copy_from_slice(magic);
            }
            image
        }
        Kernel::BzImage {
            header: changes,
            protected,
        } => {
            let protected = &protected[..protected.len().min(8192)];
            let mut header = header();
            header.syssize = (protected.len() / 16) as u32;
            changes.change(&mut header);
            bzimage(&header, protected)
        }
        Kernel::Packed {
            header: changes,
            vmlinux,
        } => {
            const OFFSET: usize = 0x300;
            let payload = vmlinux.pack();
            let mut header = header();
            (header.payload_offset, header.payload_length) = (OFFSET as u32, payload.len() as u32);
            let mut protected = vec![0x90; OFFSET];
            protected.extend(payload);
            protected.resize(protected.len().next_multiple_of(16), 0);
            header.syssize = (protected.len() / 16) as u32;
            changes.change(&mut header);
            bzimage(&header, &protected)
        }
        Kernel::Elf {
            entry,
            segments,
            notes,
            contents,
        } => {
            let mut all = Vec::new();
            for entry in notes.iter().take(4) {
                let name: &[u8] = if entry.xen { b"Xen\0" } else { b"GNU\0" };
                let value = &entry.value[..entry.value.len().min(64)];
                all.extend(note(name, entry.kind.unwrap_or(18), value));
            }
            let contents = &contents[..contents.len().min(4096)];
            let start = 64 + 56 * (segments.len().min(6) + 2);
            let (len, all_len) = (contents.len() as u64, all.len() as u64);
            let mut table = vec![
                Segment {
                    kind: LOAD,
                    offset: start as u64,
                    address: BASE,
                    in_file: len,
                    in_memory: len + 4096,
                },
                Segment {
                    kind: NOTE,
                    offset: start as u64 + len,
                    address: 0,
                    in_file: all_len,
                    in_memory: all_len,
                },
            ];
            table.extend(segments.iter().take(6).map(|(kind, words)| {
                let kind = match kind {
                    Kind::Load => LOAD,
                    Kind::Note => NOTE,
                    Kind::Other(kind) => *kind,
                };
                let usual = [start as u64, BASE + 0x10_0000, len, len];
                let [offset, address, in_file, in_memory] = std::array::from_fn(|at| words[at].or(usual[at]));
                Segment {
                    kind,
                    offset,
                    address,
                    in_file,
                    in_memory,
                }
            }));
            let mut image = elf(entry.or(BASE), 0, &table);
            image.extend_from_slice(contents);
            image.extend(all);
            image
        }
    }
}

fuzz_target!(|input: Input<'_>| {
    let mut image = image(&input.kernel);
    for (at, value) in input.patches.iter().take(6) {
        if let Some(place) = image.get_mut(usize::from(*at)..) {
            value.put(place, false);
        }
    }
    if let Some(len) = input.cut {
        image.truncate(len.into());
    }
    let initrd = input.initrd.map(|len| vec![0x5a; len.into()]);
    let command_line = match input.command_line {
        CommandLine::Quiet => "quiet",
        CommandLine::Plain => "nokaslr",
        CommandLine::VirtualOnly => "mem=512M",
        CommandLine::Text(text) => text,
    };
    let machine = Machine::new(MEMORY);
    match load(
        &machine,
        &image,
        initrd.as_deref(),
        command_line.into(),
        input.seed,
    ) {
        Ok(loaded) => {
            let (CpuEntry::Linux64 { rip } | CpuEntry::Pvh { rip }) = loaded.entry;
            assert!((layout::HIMEM..MEMORY).contains(&rip), "{rip:#x}");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
