//! Feeds disks with a GPT, its backup, an MBR and logical partitions, of changed fields and right checksums, to the
//! search for a kernel. Asserts that partitions have numbers of their own, and that a filesystem in one is found.

#![no_main]

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use husk_fuzz::images::{Value, fat, search};
use husk_image::Table;
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    large_sectors: bool,
    mbr: Option<[Partition; 4]>,
    records: Vec<(u8, [Partition; 2])>,
    primary: Option<Header>,
    backup: Option<Header>,
    entries: Vec<Entry>,
    patches: Vec<(u32, Value)>,
    cut: Option<u16>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Partition {
    active: bool,
    kind: u8,
    first: Sector,
    sectors: Sector,
}

/// A number of sectors, or of one.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Sector {
    Zero,
    Filesystem,
    Small(u8),
    Any(u64),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Header {
    entries_at: Option<Sector>,
    entries: Option<u32>,
    entry_size: Option<u32>,
    wrong_header_sum: bool,
    wrong_entries_sum: bool,
    field: Option<(u8, Value)>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Entry {
    kind: u8,
    first: Sector,
    last: Sector,
    name: u16,
}

const SIZE: usize = 192 << 10;
/// First byte of the filesystem.
const START: usize = 64 << 10;
const ENTRIES: usize = 8;

static FILESYSTEM: LazyLock<Vec<u8>> = LazyLock::new(|| {
    fat(
        64,
        &[("/loader/entries/e.conf", b"linux /k\n"), ("/k", b"kernel")],
    )
});

const KINDS: [u8; 10] = [0x83, 0x05, 0x0f, 0x85, 0xee, 0xef, 0x00, 0x0b, 0xea, 0x82];
const GUIDS: [[u8; 16]; 4] = [
    [0; 16],
    [
        0xaf, 0x3d, 0xc6, 0x0f, 0x83, 0x84, 0x72, 0x47, 0x8e, 0x79, 0x3d, 0x69, 0xd8, 0x47, 0x7d, 0xe4,
    ],
    [
        0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9, 0x3b,
    ],
    [9; 16],
];

/// CRC-32 as GPT has it.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
    let byte = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), step);
    !bytes.iter().fold(!0, byte)
}

impl Sector {
    /// As the first sector, or as a number of them.
    fn first(self, size: usize) -> u64 {
        match self {
            Self::Zero => 0,
            Self::Filesystem => (START / size) as u64,
            Self::Small(sector) => sector.into(),
            Self::Any(sector) => sector,
        }
    }

    fn last(self, size: usize) -> u64 {
        match self {
            Self::Filesystem => ((START + FILESYSTEM.len()) / size - 1) as u64,
            other => other.first(size),
        }
    }

    fn count(self) -> u32 {
        match self {
            Self::Filesystem => (FILESYSTEM.len() / 512) as u32,
            other => other.first(512) as u32,
        }
    }
}

/// Writes boot records; the first sector of a logical partition counts from `base`.
fn record(disk: &mut [u8], sector: usize, partitions: &[Partition], base: u32) {
    let record = &mut disk[sector * 512..][..512];
    record[510..].copy_from_slice(&[0x55, 0xaa]);
    for (entry, partition) in record[446..510].chunks_exact_mut(16).zip(partitions) {
        entry[0] = if partition.active { 0x80 } else { 0 };
        entry[4] = KINDS[usize::from(partition.kind) % KINDS.len()];
        let first = (partition.first.first(512) as u32).wrapping_sub(base);
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..].copy_from_slice(&partition.sectors.count().to_le_bytes());
    }
}

fn header(
    disk: &mut [u8],
    sector: usize,
    (own, other, entries_at): (u64, u64, u64),
    header: Header,
    entries: &[u8],
) {
    let mut bytes = [0; 92];
    let entries_at = header.entries_at.map_or(entries_at, |at| at.first(sector));
    let count = header.entries.unwrap_or(ENTRIES as u32);
    bytes[..16].copy_from_slice(b"EFI PART\0\0\x01\0\x5c\0\0\0");
    for (at, value) in [(24, own), (32, other), (40, 6), (48, other), (72, entries_at)] {
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    bytes[80..84].copy_from_slice(&count.to_le_bytes());
    bytes[84..88].copy_from_slice(&header.entry_size.unwrap_or(128).to_le_bytes());
    // Behind the entries that were made are zeroes, as far as they are summed.
    let mut summed = entries.to_vec();
    summed.resize(count.min(1024) as usize * 128, 0);
    let sum = crc32(&summed) ^ u32::from(header.wrong_entries_sum);
    bytes[88..].copy_from_slice(&sum.to_le_bytes());
    if let Some((at, value)) = header.field {
        value.put(&mut bytes[usize::from(at) % 92..], false);
    }
    bytes[16..20].fill(0);
    let sum = crc32(&bytes) ^ u32::from(header.wrong_header_sum);
    bytes[16..20].copy_from_slice(&sum.to_le_bytes());
    let at = own as usize * sector;
    disk[at..at + 92].copy_from_slice(&bytes);
}

fn entries(input: &Input, sector: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entry in input.entries.iter().take(ENTRIES) {
        bytes.extend_from_slice(&GUIDS[usize::from(entry.kind) % GUIDS.len()]);
        bytes.extend_from_slice(&[entry.kind; 16]);
        bytes.extend_from_slice(&entry.first.first(sector).to_le_bytes());
        bytes.extend_from_slice(&entry.last.last(sector).to_le_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(&entry.name.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(128), 0);
    }
    bytes.resize(ENTRIES * 128, 0);
    bytes
}

fuzz_target!(|input: Input| {
    let sector = if input.large_sectors { 4096 } else { 512 };
    let last = (SIZE / sector) as u64 - 1;
    let mut disk = vec![0; SIZE];
    disk[START..START + FILESYSTEM.len()].copy_from_slice(&FILESYSTEM);
    if let Some(partitions) = &input.mbr {
        record(&mut disk, 0, partitions, 0);
    } else if input.primary.is_some() || input.backup.is_some() {
        // A GPT without a protective entry is ignored.
        disk[446 + 4] = 0xee;
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    }
    for (at, partitions) in input.records.iter().take(40) {
        let at = 16 + usize::from(*at) % 64;
        record(&mut disk, at, partitions, at as u32);
    }
    let array = entries(&input, sector);
    for (own, other, at, chosen) in [(1, last, 2, input.primary), (last, 1, last - 3, input.backup)] {
        if let Some(chosen) = chosen {
            let from = at as usize * sector;
            disk[from..from + array.len()].copy_from_slice(&array);
            header(&mut disk, sector, (own, other, at), chosen, &array);
        }
    }
    for (at, value) in input.patches.iter().take(6) {
        let at = *at as usize % START;
        value.put(&mut disk[at..], false);
    }
    if let Some(len) = input.cut {
        disk.truncate(usize::from(len) * 8);
    }
    match search(disk) {
        Ok(entry) => assert_eq!(entry.kernel().paths().collect::<Vec<_>>(), ["/k"]),
        Err(error) => {
            let mut numbers: Vec<u32> = error
                .partitions
                .iter()
                .map(|partition| partition.number)
                .collect();
            let many = if error.table == Table::Mbr { 257 } else { 256 };
            assert!(numbers.len() <= many);
            assert_eq!(numbers == [0], error.table == Table::None);
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers.len(), error.partitions.len(), "a number twice");
        }
    }
});
