//! Checks the header and the tables of an image (docs/interop/qcow2.txt of QEMU) before imago opens it.
//!
//! The checks bound memory and time for hostile images. Entries of L2 tables are trusted as far as they lead only into
//! the image's own file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

const MAGIC: u32 = 0x5146_49fb;

/// Bytes of a version 2 header, and the minimum of a version 3 header.
const V2: usize = 72;
const V3: usize = 104;

/// The header and its extensions must end within this many bytes.
const HEAD: u64 = 64 << 10;

/// Maximum memory of an image's tables, in bytes. imago limits the growth of L1 and refcount table itself, to 32 MiB.
const MEMORY: u64 = 64 << 20;

/// L2 tables and refcount blocks that imago caches.
const CACHED_TABLES: u64 = 128;
const CACHED_COUNTS: u64 = 32;

/// Maximum reference counts that an allocation may have to scan: those of 4 TiB in clusters of 64 KiB.
const COUNTS: u64 = 1 << 26;

const ENCRYPTION: u32 = 0x0537_be77;
const DATA_FILE: u32 = 0x4441_5441;
const FEATURE_NAMES: u32 = 0x6803_f857;

/// Bytes of an entry of the table of feature names.
const FEATURE_NAME: usize = 48;

/// Host offset in an entry of an L1 or L2 table: bits 9 to 55.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Bit of an L2 entry: the cluster is compressed.
const COMPRESSED: u64 = 1 << 62;

/// Bit of an L2 entry of version 3: the cluster reads as zeroes, even if it has a host offset.
const ZERO: u64 = 1;

/// Maximum size of the L2 tables that are read when an image is opened: those of 1 TiB in clusters of 64 KiB.
const MAX_L2_SCAN: u64 = 128 << 20;

/// The header fields that this module uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Qcow2Header {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Size of a cluster in bytes.
    pub cluster: u64,
    tables: TableLocation,
    counts: TableLocation,
    /// refcount_order: log2 of the bits of a reference count.
    count_order: u32,
    /// Version 3: an L2 entry can say that its cluster reads as zeroes.
    has_zero_flag: bool,
}

/// A table of 8-byte entries in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TableLocation {
    offset: u64,
    entries: u64,
}

pub(super) fn refused(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("qcow2: {}", why.into()))
}

impl Qcow2Header {
    /// Reads and checks the header and the tables. `writable`: the image will be written to.
    ///
    /// # Errors
    /// `InvalidData`: the image is refused; the text says why. Else the kernel's error.
    pub fn load(file: &File, writable: bool) -> io::Result<Self> {
        let len = file.metadata()?.len();
        let mut head = vec![0; len.min(HEAD) as usize];
        file.read_exact_at(&mut head, 0)?;
        let header = Self::parse(&head, len, writable)?;
        header.check_entries(file, len, writable)?;
        header.check_data(file, len, writable)?;
        Ok(header)
    }

    /// Parses the first bytes of a file of `len` bytes.
    fn parse(head: &[u8], len: u64, writable: bool) -> io::Result<Self> {
        if head.len() < V2 || be32(head, 0) != MAGIC {
            return Err(refused("not a qcow2 image"));
        }
        let version = be32(head, 4);
        if !matches!(version, 2 | 3) {
            return Err(refused(format!(
                "version {version} is not supported, only 2 and 3"
            )));
        }
        if version == 3 && head.len() < V3 {
            return Err(refused("the header is cut off"));
        }
        let cluster_bits = be32(head, 20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(refused(format!(
                "unsupported cluster size of 2^{cluster_bits} bytes, not 2^9 to 2^21"
            )));
        }
        if be64(head, 8) != 0 {
            return Err(refused("it names a backing file"));
        }
        if be32(head, 32) != 0 {
            return Err(refused("it is encrypted"));
        }
        let snapshots = be32(head, 60);
        if writable && snapshots != 0 {
            return Err(refused(format!(
                "writing would lose its {snapshots} internal snapshots: delete them, or open it read-only"
            )));
        }
        let cluster = 1 << cluster_bits;
        let count_order = if version == 3 {
            check_features(be64(head, 72))?;
            check_extensions(head, cluster)?;
            be32(head, 96)
        } else {
            4
        };
        if count_order > 6 {
            return Err(refused(format!(
                "unsupported reference counts of 2^{count_order} bits, more than 2^6"
            )));
        }
        let header = Self {
            size: be64(head, 24),
            cluster,
            tables: TableLocation {
                offset: be64(head, 40),
                entries: be32(head, 36).into(),
            },
            counts: TableLocation {
                offset: be64(head, 48),
                entries: u64::from(be32(head, 56)) * (cluster / 8),
            },
            count_order,
            has_zero_flag: version == 3,
        };
        header.check_tables(len)?;
        Ok(header)
    }

    /// Checks that the L1 table and the refcount table fit the disk, the file, and memory.
    fn check_tables(&self, len: u64) -> io::Result<()> {
        if self.size == 0 || !self.size.is_multiple_of(512) || i64::try_from(self.size).is_err() {
            return Err(refused(format!(
                "unsupported size of {} bytes: it is 0, not a multiple of 512, or too large",
                self.size
            )));
        }
        let needed = self.tables_needed();
        if self.tables.entries < needed {
            return Err(refused(format!(
                "the L1 table has {} entries, but the disk needs {needed}",
                self.tables.entries
            )));
        }
        for (table, name) in [(self.tables, "the L1 table"), (self.counts, "the refcount table")] {
            let end = table.offset.checked_add(table.entries * 8);
            if table.entries == 0 || table.offset < self.cluster || !table.offset.is_multiple_of(self.cluster)
            {
                return Err(refused(format!(
                    "{name} has an invalid offset {:#x}",
                    table.offset
                )));
            }
            if end.is_none_or(|end| end > len) {
                return Err(refused(format!(
                    "{name} at {:#x} is not in the file of {len} bytes; if it was cut off, copy or pull it again",
                    table.offset
                )));
            }
        }
        self.check_memory(0)
    }

    /// `counted`: refcount blocks of an image that is written to, else 0.
    fn check_memory(&self, counted: u64) -> io::Result<()> {
        let cached = self.tables_needed().min(CACHED_TABLES) + counted.min(CACHED_COUNTS);
        // imago holds L1 and refcount table twice while it reads them.
        let upper = (self.tables.entries + self.counts.entries) * 16;
        let bytes = cached * self.cluster + upper;
        if bytes > MEMORY {
            return Err(refused(format!(
                "its tables would take {} MiB of memory, more than 64: convert it to larger clusters",
                bytes >> 20
            )));
        }
        Ok(())
    }

    /// Number of L2 tables that cover the disk.
    fn tables_needed(&self) -> u64 {
        self.size.div_ceil(self.cluster * (self.cluster / 8))
    }

    /// Checks that every L2 table and refcount block has a place of its own in the file.
    fn check_entries(&self, file: &File, len: u64, writable: bool) -> io::Result<()> {
        let mut places: Vec<u64> = self
            .clusters_of(self.tables)
            .chain(self.clusters_of(self.counts))
            .chain([0])
            .collect();
        each_entry(file, self.tables, |entry| match entry & OFFSET {
            0 => Ok(()),
            at => self.place(&mut places, at, len, "an L2 table"),
        })?;
        if writable {
            let mut counted = 0;
            each_entry(file, self.counts, |entry| match entry & !511 {
                0 => Ok(()),
                at => {
                    counted += 1;
                    self.place(&mut places, at, len, "a refcount block")
                }
            })?;
            let per_block = (self.cluster * 8) >> self.count_order;
            if counted * per_block > COUNTS {
                return Err(refused(format!(
                    "its refcount table covers {} clusters, more than {COUNTS}: convert it to larger clusters",
                    counted * per_block
                )));
            }
            let growth = self.size / self.cluster / per_block + 2;
            self.check_memory(counted.saturating_add(growth))?;
        } else {
            // Only to see that they are there: an image that is not written to needs no reference counts.
            each_entry(file, self.counts, |entry| match entry & !511 {
                0 => Ok(()),
                at => self.check_place(at, len, "a refcount block"),
            })?;
        }
        places.sort_unstable();
        match places.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(refused(format!("two tables in one cluster, at {:#x}", pair[0]))),
            None if writable => self.check_first_count(file),
            None => Ok(()),
        }
    }

    /// Checks that the first cluster, which has the header, is counted as used. imago would allocate it, and without the
    /// refcount block of it would recurse without end: it takes a block at offset 0 for none.
    fn check_first_count(&self, file: &File) -> io::Result<()> {
        let mut entry = [0; 8];
        file.read_exact_at(&mut entry, self.counts.offset)?;
        let block = u64::from_be_bytes(entry) & !511;
        let bits = 1_usize << self.count_order;
        let mut count = [0_u8; 8];
        let count = &mut count[..(bits / 8).max(1)];
        if block != 0 {
            file.read_exact_at(count, block)?;
        }
        if bits < 8 {
            count[0] &= (1 << bits) - 1;
        }
        match count.iter().all(|byte| *byte == 0) {
            true => Err(refused("it counts the cluster of its header as free")),
            false => Ok(()),
        }
    }

    /// Checks that the clusters that the L2 tables name are in the file: a file that is cut off would read as zeroes.
    ///
    /// An image that is written to is only warned about. After a power failure its tables may name clusters that the
    /// guest wrote, never flushed, and so cannot count on.
    fn check_data(&self, file: &File, len: u64, writable: bool) -> io::Result<()> {
        let per_table = self.cluster / 8;
        let (mut scanned, mut table, mut missing) = (0, 0, None);
        each_entry(file, self.tables, |entry| {
            let first = table * per_table;
            table += 1;
            let offset = entry & OFFSET;
            if offset == 0 || table > self.tables_needed() || scanned >= MAX_L2_SCAN {
                return Ok(());
            }
            let entries = per_table.min(self.size.div_ceil(self.cluster) - first);
            scanned += self.cluster;
            let mut cluster = first;
            each_entry(file, TableLocation { offset, entries }, |entry| {
                let end = self.data_end(entry, cluster);
                cluster += 1;
                if end > len {
                    missing = missing.max(Some(end));
                }
                Ok(())
            })
        })?;
        let Some(end) = missing else { return Ok(()) };
        let why = format!(
            "the file is cut off: it has {len} bytes, and its tables name data up to byte {end}; copy or pull it again"
        );
        if writable {
            tracing::warn!(?file, "qcow2: {why}; what is missing reads as zeroes");
            return Ok(());
        }
        Err(refused(why))
    }

    /// Bytes that the file needs for what an L2 entry names, 0 if it names nothing. `cluster` is the number of the
    /// guest's cluster.
    fn data_end(&self, entry: u64, cluster: u64) -> u64 {
        if entry & COMPRESSED != 0 {
            // Sectors after the first one are counted above the host offset. The last one need not be whole.
            let offset_bits = 62 - (self.cluster.ilog2() - 8);
            let offset = entry & ((1 << offset_bits) - 1);
            let more = (entry & (COMPRESSED - 1)) >> offset_bits;
            return match more {
                0 => offset + 1,
                _ => (offset & !511) + more * 512 + 1,
            };
        }
        let offset = entry & OFFSET;
        if offset == 0 || self.has_zero_flag && entry & ZERO != 0 {
            return 0;
        }
        // The disk may end within its last cluster.
        offset + self.cluster.min(self.size - cluster * self.cluster)
    }

    fn place(&self, places: &mut Vec<u64>, at: u64, len: u64, what: &str) -> io::Result<()> {
        self.check_place(at, len, what)?;
        places.push(at);
        Ok(())
    }

    /// Checks that a table of one cluster is in the file.
    fn check_place(&self, at: u64, len: u64, what: &str) -> io::Result<()> {
        if !at.is_multiple_of(self.cluster) || at.checked_add(self.cluster).is_none_or(|end| end > len) {
            return Err(refused(format!(
                "{what} at {at:#x} is not in the file of {len} bytes; if it was cut off, copy or pull it again"
            )));
        }
        Ok(())
    }

    fn clusters_of(&self, table: TableLocation) -> impl Iterator<Item = u64> + use<> {
        let end = table.offset + table.entries * 8;
        (table.offset..end).step_by(self.cluster as usize)
    }
}

/// Refuses incompatible features.
fn check_features(bits: u64) -> io::Result<()> {
    let name = match bits.trailing_zeros() {
        64 => return Ok(()),
        0 => "it was not closed, or is being written to (dirty)".into(),
        1 => "it is marked as corrupt".into(),
        2 => "its data is in another file".into(),
        3 => "its clusters are not compressed with zlib".into(),
        4 => "it has extended L2 entries".into(),
        bit => format!("incompatible feature {bit} is not known"),
    };
    Err(refused(name))
}

fn check_extensions(head: &[u8], cluster: u64) -> io::Result<()> {
    let end = head.len().min(cluster as usize);
    let mut at = be32(head, 100) as usize;
    if at < V3 || !at.is_multiple_of(8) {
        return Err(refused(format!("invalid header length of {at} bytes")));
    }
    loop {
        let Some(Range { start, .. }) = fits(at, 8, end) else {
            return Err(refused("the header extensions run past the header"));
        };
        let (kind, len) = (be32(head, start), be32(head, start + 4) as usize);
        match kind {
            0 => return Ok(()),
            DATA_FILE => return Err(refused("it names a data file")),
            ENCRYPTION => return Err(refused("it is encrypted")),
            // imago panics.
            FEATURE_NAMES if !len.is_multiple_of(FEATURE_NAME) => {
                return Err(refused("its table of feature names is cut off"));
            }
            _ => {}
        }
        let Some(content) = fits(at + 8, len, end) else {
            return Err(refused("the header extensions run past the header"));
        };
        at = content.end.next_multiple_of(8);
    }
}

fn fits(at: usize, len: usize, end: usize) -> Option<Range<usize>> {
    let stop = at.checked_add(len).filter(|stop| *stop <= end)?;
    Some(at..stop)
}

/// Calls `each` for every entry of a table, which is in the file.
fn each_entry(
    file: &File,
    table: TableLocation,
    mut each: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<()> {
    let (mut at, end) = (table.offset, table.offset + table.entries * 8);
    let mut piece = vec![0; (end - at).min(PIECE) as usize];
    while at < end {
        let piece = &mut piece[..(end - at).min(PIECE) as usize];
        file.read_exact_at(piece, at)?;
        for entry in piece.as_chunks::<8>().0 {
            each(u64::from_be_bytes(*entry))?;
        }
        at += piece.len() as u64;
    }
    Ok(())
}

/// Bytes of a table that are read at a time.
const PIECE: u64 = 64 << 10;

fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4]
        .iter()
        .fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}
