//! Partition tables: GPT (UEFI specification §5.3) with its backup, and MBR with logical partitions.

use std::collections::HashSet;
use std::fmt;
use std::io::{Seek, SeekFrom};

use gptman::{GPTHeader, GPTPartitionEntry};
use uuid::{Uuid, uuid};

use crate::source::{Cursor, Extent};

/// Maximum number of partitions; further ones are ignored.
pub(crate) const MAX_PARTITIONS: usize = 256;
/// Entries accepted in a GPT's array (128 is the usual size).
const MAX_GPT_ENTRIES: u32 = 1024;
/// The only entry size [`gptman`] reads, and the only one in use.
const GPT_ENTRY_SIZE: u32 = 128;

/// Type of the partition table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// GUID partition table.
    Gpt,
    /// Master boot record.
    Mbr,
    /// No table: the disk is one filesystem.
    None,
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpt => "GPT",
            Self::Mbr => "MBR",
            Self::None => "no partition table",
        })
    }
}

/// One partition, or the whole disk where there is no table.
#[derive(Clone, Debug)]
pub(crate) struct Partition {
    /// As Linux and GRUB count, from 1; 0 is the whole disk.
    pub number: u32,
    /// Name of its type, for messages.
    pub kind: String,
    /// Its extent; none if it exceeds the disk.
    pub extent: Option<Extent>,
    /// Size in bytes, as the table says.
    pub size: u64,
}

/// The partition table of a disk.
#[derive(Debug)]
pub(crate) struct Layout {
    pub table: Table,
    pub partitions: Vec<Partition>,
    /// Warnings, such as a damaged primary GPT header.
    pub notes: Vec<String>,
}

/// Reads the partition table of `disk`.
pub(crate) fn layout(disk: &Extent) -> Layout {
    let mut notes = Vec::new();
    if let Some(partitions) = gpt(disk, &mut notes) {
        return Layout {
            table: Table::Gpt,
            partitions,
            notes,
        };
    }
    match mbr(disk, &mut notes) {
        Some(partitions) => Layout {
            table: Table::Mbr,
            partitions,
            notes,
        },
        None => {
            let whole = Partition {
                number: 0,
                kind: String::new(),
                extent: Some(disk.clone()),
                size: disk.len(),
            };
            Layout {
                table: Table::None,
                partitions: vec![whole],
                notes,
            }
        }
    }
}

fn gpt(disk: &Extent, notes: &mut Vec<String>) -> Option<Vec<Partition>> {
    // Linux and GRUB ignore a GPT without it: one may be left from what the disk held before.
    mbr_entries(disk, 0)?.iter().find(|e| e.kind == GPT_PROTECTIVE)?;
    for sector in [512, 1024, 2048, 4096] {
        let last = (disk.len() / sector).checked_sub(1)?;
        let primary = gpt_at(disk, 1, sector);
        match primary {
            Ok(partitions) => return Some(partitions),
            Err(GptError::Absent) => {}
            Err(GptError::Bad(why)) => notes.push(format!("GPT header: {why}")),
        }
        match gpt_at(disk, last, sector) {
            Ok(partitions) => {
                notes.push("the backup GPT was used".to_owned());
                return Some(partitions);
            }
            Err(GptError::Absent) => {}
            Err(GptError::Bad(why)) => notes.push(format!("backup GPT header: {why}")),
        }
    }
    None
}

enum GptError {
    Absent,
    Bad(String),
}

fn gpt_at(disk: &Extent, lba: u64, sector: u64) -> Result<Vec<Partition>, GptError> {
    let bad = |e: gptman::Error| GptError::Bad(e.to_string());
    let at = lba.checked_mul(sector).ok_or(GptError::Absent)?;
    if disk.bytes::<8>(at).as_ref() != Some(b"EFI PART") {
        return Err(GptError::Absent);
    }
    let mut cursor = Cursor::new(disk.clone());
    cursor
        .seek(SeekFrom::Start(at))
        .map_err(|e| GptError::Bad(e.to_string()))?;
    let header = GPTHeader::read_from(&mut cursor).map_err(bad)?;
    // The crate allocates by the count and multiplies without checks, so the header is checked first.
    if header.size_of_partition_entry != GPT_ENTRY_SIZE
        || header.number_of_partition_entries > MAX_GPT_ENTRIES
    {
        return Err(GptError::Bad(format!(
            "{} entries of {} bytes are not supported",
            header.number_of_partition_entries, header.size_of_partition_entry
        )));
    }
    if header.partition_entry_lba > disk.len() / sector {
        return Err(GptError::Bad(
            "the entry array lies past the end of the disk".to_owned(),
        ));
    }
    let entries = header.read_partitions(&mut cursor, sector).map_err(bad)?;
    let used = (1..).zip(&entries).filter(|(_, entry)| entry.is_used());
    Ok(used
        .take(MAX_PARTITIONS)
        .map(|(number, entry)| gpt_partition(disk, number, entry, sector))
        .collect())
}

fn gpt_partition(disk: &Extent, number: u32, entry: &GPTPartitionEntry, sector: u64) -> Partition {
    let sectors = entry
        .ending_lba
        .checked_sub(entry.starting_lba)
        .and_then(|n| n.checked_add(1));
    let size = sectors.and_then(|n| n.checked_mul(sector)).unwrap_or(0);
    let start = entry.starting_lba.checked_mul(sector);
    Partition {
        number,
        kind: gpt_type(Uuid::from_bytes_le(entry.partition_type_guid)),
        extent: start
            .filter(|_| size > 0)
            .and_then(|start| disk.slice(start, size)),
        size,
    }
}

/// Names of the types a Linux disk has (UAPI Discoverable Partitions Specification and the table in util-linux).
fn gpt_type(guid: Uuid) -> String {
    const NAMES: [(Uuid, &str); 13] = [
        (uuid!("c12a7328-f81f-11d2-ba4b-00a0c93ec93b"), "EFI system"),
        (
            uuid!("bc13c2ff-59e6-4262-a352-b275fd6f7172"),
            "extended boot loader",
        ),
        (uuid!("21686148-6449-6e6f-744e-656564454649"), "BIOS boot"),
        (uuid!("0fc63daf-8483-4772-8e79-3d69d8477de4"), "Linux filesystem"),
        (uuid!("4f68bce3-e8cd-4db1-96e7-fbcaf984b709"), "Linux root x86-64"),
        (uuid!("8484680c-9521-48c6-9c11-b0720656f69e"), "Linux /usr x86-64"),
        (uuid!("933ac7e1-2eb4-4f13-b844-0e14e2aef915"), "Linux home"),
        (uuid!("3b8f8425-20e0-4f3b-907f-1a25a76f98e8"), "Linux server data"),
        (uuid!("0657fd6d-a4ab-43c4-84e5-0933c84b4f4f"), "Linux swap"),
        (uuid!("e6d6d379-f507-44c2-a23c-238f2a3df928"), "Linux LVM"),
        (uuid!("a19d880f-05fc-4d3b-a006-743f0f84911e"), "Linux RAID"),
        (uuid!("ca7d7ccb-63ed-4c53-861c-1742536059cc"), "Linux LUKS"),
        (
            uuid!("ebd0a0a2-b9e5-4433-87c0-68b6b72699c7"),
            "Microsoft basic data",
        ),
    ];
    NAMES
        .iter()
        .find(|(id, _)| *id == guid)
        .map_or_else(|| format!("type {guid}"), |(_, name)| (*name).to_owned())
}

const MBR_SECTOR: u64 = 512;
const GPT_PROTECTIVE: u8 = 0xee;

struct MbrEntry {
    flag: u8,
    kind: u8,
    first: u32,
    sectors: u32,
}

/// The four entries of the boot record at `at`, if it carries the signature.
fn mbr_entries(disk: &Extent, at: u64) -> Option<[MbrEntry; 4]> {
    let sector: [u8; 512] = disk.bytes(at)?;
    if sector[510..] != [0x55, 0xaa] {
        return None;
    }
    Some(std::array::from_fn(|i| {
        let e = &sector[446 + 16 * i..462 + 16 * i];
        MbrEntry {
            flag: e[0],
            kind: e[4],
            first: u32::from_le_bytes([e[8], e[9], e[10], e[11]]),
            sectors: u32::from_le_bytes([e[12], e[13], e[14], e[15]]),
        }
    }))
}

fn is_extended(kind: u8) -> bool {
    matches!(kind, 0x05 | 0x0f | 0x85)
}

fn mbr(disk: &Extent, notes: &mut Vec<String>) -> Option<Vec<Partition>> {
    let entries = mbr_entries(disk, 0)?;
    // A FAT boot sector has the same signature, but code in place of the entries.
    let sane = entries.iter().all(|e| matches!(e.flag, 0x00 | 0x80));
    if !sane
        || entries
            .iter()
            .all(|e| e.kind == 0 || e.sectors == 0 || e.first == 0)
    {
        return None;
    }
    if entries.iter().any(|e| e.kind == GPT_PROTECTIVE) && notes.is_empty() {
        notes.push("the MBR says GPT, but neither the GPT header nor its backup is there".to_owned());
    }
    let mut partitions = Vec::new();
    let mut extended = None;
    for (number, e) in (1..).zip(&entries) {
        if is_extended(e.kind) {
            extended.get_or_insert(e.first);
        }
        if e.kind != 0 && e.sectors != 0 {
            partitions.push(mbr_partition(disk, number, u64::from(e.first), e));
        }
    }
    if let Some(first) = extended {
        logical(disk, u64::from(first), &mut partitions, notes);
    }
    Some(partitions)
}

/// Follows the chain of extended boot records: in each, the first entry is relative to the record, the link to
/// the next one relative to the extended partition.
fn logical(disk: &Extent, base: u64, partitions: &mut Vec<Partition>, notes: &mut Vec<String>) {
    let mut seen = HashSet::new();
    let (mut record, mut number) = (base, 5);
    while partitions.len() < MAX_PARTITIONS {
        if !seen.insert(record) || seen.len() > MAX_PARTITIONS {
            notes.push("the chain of logical partitions is a loop".to_owned());
            return;
        }
        let Some(entries) = mbr_entries(disk, record * MBR_SECTOR) else {
            notes.push(format!(
                "the chain of logical partitions breaks off at sector {record}"
            ));
            return;
        };
        let mut next = None;
        for e in &entries[..2] {
            if e.sectors == 0 || e.kind == 0 {
                continue;
            }
            if is_extended(e.kind) {
                next.get_or_insert(base + u64::from(e.first));
            } else {
                partitions.push(mbr_partition(disk, number, record + u64::from(e.first), e));
                number += 1;
            }
        }
        match next {
            Some(at) => record = at,
            None => return,
        }
    }
}

fn mbr_partition(disk: &Extent, number: u32, first: u64, entry: &MbrEntry) -> Partition {
    let size = u64::from(entry.sectors) * MBR_SECTOR;
    let kind = match entry.kind {
        0x01 | 0x04 | 0x06 | 0x0b | 0x0c | 0x0e => "FAT".to_owned(),
        0x05 | 0x0f | 0x85 => "extended".to_owned(),
        0x07 => "NTFS/exFAT".to_owned(),
        0x82 => "Linux swap".to_owned(),
        0x83 => "Linux".to_owned(),
        0x8e => "Linux LVM".to_owned(),
        0xea => "extended boot loader".to_owned(),
        0xee => "GPT protective".to_owned(),
        0xef => "EFI system".to_owned(),
        0xfd => "Linux RAID".to_owned(),
        other => format!("type {other:#04x}"),
    };
    Partition {
        number,
        kind,
        extent: disk.slice(first * MBR_SECTOR, size),
        size,
    }
}
