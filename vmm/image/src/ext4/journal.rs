//! Replays a jbd2 journal in memory, as the kernel would at mount (kernel documentation, ext4/journal).
//!
//! After a reset of the guest, its last changes, such as a kernel upgrade, may be in the journal only. `ext4-view`
//! replays journals too, but without wrapping at the end of the log, without revocations of earlier transactions, and
//! only those with checksums of version 3, so its result may mix two states.

use std::collections::{BTreeMap, HashMap};
use std::io;

use super::extents::{Run, TreeError, runs};
use super::superblock::{Superblock, crc32c};
use super::{le16, le32};
use crate::source::Extent;

const MAGIC: u32 = 0xc03b_3998;
const DESCRIPTOR: u32 = 1;
const COMMIT: u32 = 2;
const SUPERBLOCK_V2: u32 = 4;
const REVOKE: u32 = 5;

const INCOMPAT_64BIT: u32 = 0x2;
const INCOMPAT_CSUM_V2: u32 = 0x8;
const INCOMPAT_CSUM_V3: u32 = 0x10;
const INCOMPAT_FAST_COMMIT: u32 = 0x20;
const INCOMPAT_KNOWN: u32 = 0x3f;

const TAG_ESCAPED: u32 = 1;
const TAG_SAME_UUID: u32 = 2;
const TAG_LAST: u32 = 8;

/// Maximum number of blocks of a journal: 4 GiB at 4 KiB each, four times what mke2fs makes at most.
const MAX_BLOCKS: u32 = 1 << 20;
/// Maximum number of extents of a journal file.
const MAX_EXTENTS: usize = 4096;

/// Location of the newest copy of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct JournalCopy {
    block: u64,
    /// The copy's first four bytes were the journal's magic number and are stored as zeros.
    escaped: bool,
}

/// The blocks for which the journal holds a newer copy.
#[derive(Debug, Default)]
pub(crate) struct JournalOverlay {
    block_size: u64,
    copies: BTreeMap<u64, JournalCopy>,
    /// Name of the records after the transactions in `copies`, if Husk cannot replay them.
    pub(crate) rest: Option<&'static str>,
}

impl JournalOverlay {
    /// Reads the journal of the filesystem on `extent`; the error says why it cannot be replayed.
    pub(crate) fn load(extent: &Extent, fs: &Superblock) -> Result<Self, &'static str> {
        let mut log = Journal::open(extent, fs)?;
        log.scan()?;
        Ok(Self {
            block_size: fs.block_size,
            copies: log.copies,
            rest: log.rest,
        })
    }

    /// Puts the newer copies into `dst`, the bytes from `start` of the filesystem.
    pub(crate) fn patch(
        &self,
        start: u64,
        dst: &mut [u8],
        read: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        if self.copies.is_empty() || dst.is_empty() {
            return Ok(());
        }
        let end = start.saturating_add(dst.len() as u64);
        let blocks = start / self.block_size..=(end - 1) / self.block_size;
        for (block, copy) in self.copies.range(blocks) {
            let at = block * self.block_size;
            let (from, to) = (at.max(start), (at + self.block_size).min(end));
            let part = &mut dst[(from - start) as usize..(to - start) as usize];
            let skip = from - at;
            read(copy.block * self.block_size + skip, part)?;
            if copy.escaped && skip < 4 {
                for (byte, magic) in part.iter_mut().zip(&MAGIC.to_be_bytes()[skip as usize..]) {
                    *byte = *magic;
                }
            }
        }
        Ok(())
    }
}

/// The journal as a ring of blocks, and the copies found in it.
struct Journal<'a> {
    extent: &'a Extent,
    block_size: u64,
    extents: Vec<Run>,
    incompat: u32,
    checksum_seed: [u8; 16],
    first: u32,
    last: u32,
    start: u32,
    sequence: u32,
    copies: BTreeMap<u64, JournalCopy>,
    rest: Option<&'static str>,
}

impl<'a> Journal<'a> {
    fn open(extent: &'a Extent, fs: &Superblock) -> Result<Self, &'static str> {
        let mut log = Self {
            extent,
            block_size: fs.block_size,
            extents: Vec::new(),
            incompat: 0,
            checksum_seed: [0; 16],
            first: 0,
            last: 0,
            start: 0,
            sequence: 0,
            copies: BTreeMap::new(),
            rest: None,
        };
        let inode = journal_inode(extent, fs).ok_or("the journal's inode cannot be read")?;
        const EXTENTS_FLAG: u32 = 0x8_0000;
        if le32(&inode, 0x20) & EXTENTS_FLAG == 0 {
            return Err("the journal is not stored in extents");
        }
        let read = |block| log.fs_block(block);
        let runs = runs(&inode[0x28..0x28 + 60], fs.blocks, MAX_EXTENTS, &read);
        log.extents = runs.map_err(|error| match error {
            TreeError::Damaged => "the journal's extent tree is damaged",
            TreeError::TooLarge => "the journal has too many extents",
        })?;
        if log.extents.iter().any(|run| run.unwritten) {
            return Err("the journal has blocks that were never written");
        }
        let sb = log.block(0).ok_or("the journal's superblock cannot be read")?;
        if be32(&sb, 0) != MAGIC || be32(&sb, 4) != SUPERBLOCK_V2 || u64::from(be32(&sb, 12)) != fs.block_size
        {
            return Err("the journal's superblock is damaged or old");
        }
        log.incompat = be32(&sb, 0x28);
        if log.incompat & !INCOMPAT_KNOWN != 0 {
            return Err("the journal has unsupported features");
        }
        log.checksum_seed.copy_from_slice(&sb[0x30..0x40]);
        let fast = match (log.incompat & INCOMPAT_FAST_COMMIT != 0, be32(&sb, 0x54)) {
            (false, _) => 0,
            (true, 0) => 256,
            (true, blocks) => blocks,
        };
        (log.first, log.start, log.sequence) = (be32(&sb, 0x14), be32(&sb, 0x1c), be32(&sb, 0x18));
        log.last = be32(&sb, 0x10)
            .checked_sub(fast)
            .ok_or("the journal's size is wrong")?;
        let ring = log.first..log.last;
        if log.first == 0 || log.last > MAX_BLOCKS || (log.start != 0 && !ring.contains(&log.start)) {
            return Err("the journal's bounds are wrong");
        }
        Ok(log)
    }

    /// Reads the log from its tail to the last transaction that was committed.
    fn scan(&mut self) -> Result<(), &'static str> {
        if self.start == 0 {
            return Ok(());
        }
        let (mut at, mut sequence) = (self.start, self.sequence);
        let mut open: Vec<(u64, JournalCopy)> = Vec::new();
        let mut open_revokes: Vec<u64> = Vec::new();
        let mut committed: Vec<(u32, Vec<(u64, JournalCopy)>)> = Vec::new();
        let mut revoked: HashMap<u64, u32> = HashMap::new();
        let mut left = self.last - self.first;
        while left > 0 {
            let block = self.block(at).ok_or("the journal cannot be read")?;
            if be32(&block, 0) != MAGIC || be32(&block, 8) != sequence {
                break;
            }
            let mut used = 1;
            match be32(&block, 4) {
                DESCRIPTOR if self.block_checksum_ok(&block) => {
                    let Some(tags) = self.tags(&block) else {
                        self.rest = Some("a malformed descriptor");
                        break;
                    };
                    for (target, escaped) in tags {
                        let data = self
                            .file_block(self.next(at, used))
                            .ok_or("the journal is truncated")?;
                        open.push((target, JournalCopy { block: data, escaped }));
                        used += 1;
                    }
                }
                REVOKE if self.block_checksum_ok(&block) => {
                    open_revokes.extend(self.revokes(&block));
                    if open_revokes.len() + revoked.len() > MAX_BLOCKS as usize {
                        return Err("the journal revokes too many blocks");
                    }
                }
                COMMIT if self.commit_checksum_ok(&block) => {
                    committed.push((sequence, std::mem::take(&mut open)));
                    revoked.extend(open_revokes.drain(..).map(|block| (block, sequence)));
                    sequence = sequence.wrapping_add(1);
                }
                _ => break,
            }
            at = self.next(at, used);
            left = left.saturating_sub(used);
        }
        if self.has_fast_commits(sequence) {
            self.rest = Some("fast commits");
        }
        for (sequence, blocks) in committed {
            for (target, copy) in blocks {
                // A revocation holds for its own transaction and all earlier ones; numbers wrap.
                let newest = revoked.get(&target);
                if newest.is_none_or(|r| sequence.wrapping_sub(*r).cast_signed() > 0) {
                    self.copies.insert(target, copy);
                } else {
                    self.copies.remove(&target);
                }
            }
        }
        Ok(())
    }

    /// Blocks a descriptor announces, each with true if it is escaped; `None` if the descriptor is malformed.
    fn tags(&self, block: &[u8]) -> Option<Vec<(u64, bool)>> {
        let wide = self.incompat & INCOMPAT_64BIT != 0;
        let v3 = self.incompat & INCOMPAT_CSUM_V3 != 0;
        let v2 = self.incompat & INCOMPAT_CSUM_V2 != 0;
        let size = match v3 {
            true => 16,
            false => 8 + if wide { 4 } else { 0 } + if v2 { 2 } else { 0 },
        };
        let end = block.len() - if v2 || v3 { 4 } else { 0 };
        let mut tags = Vec::new();
        let mut at = 12;
        loop {
            let tag = block.get(at..at + size).filter(|_| at + size <= end)?;
            let flags = if v3 { be32(tag, 4) } else { be32(tag, 4) & 0xffff };
            let high = if wide { be32(tag, 8) } else { 0 };
            let target = u64::from(be32(tag, 0)) | u64::from(high) << 32;
            // Not the filesystem's size: the journal may hold its growth.
            if target >= self.extent.len() / self.block_size {
                return None;
            }
            tags.push((target, flags & TAG_ESCAPED != 0));
            if flags & TAG_LAST != 0 {
                return Some(tags);
            }
            at += size + if flags & TAG_SAME_UUID == 0 { 16 } else { 0 };
        }
    }

    /// True if fast commits follow the transaction before `sequence`. The first begins with an `ext4_fc_head`.
    fn has_fast_commits(&self, sequence: u32) -> bool {
        const TAG_HEAD: u16 = 9;
        if self.incompat & INCOMPAT_FAST_COMMIT == 0 {
            return false;
        }
        // The block behind the ring is not used.
        let first = self.last.checked_add(1).and_then(|block| self.block(block));
        first.is_some_and(|block| {
            (le16(&block, 0), le16(&block, 2), le32(&block, 8)) == (TAG_HEAD, 8, sequence)
        })
    }

    fn revokes(&self, block: &[u8]) -> Vec<u64> {
        let end = (be32(block, 12) as usize).clamp(16, block.len());
        let entries = &block[16..end];
        match self.incompat & INCOMPAT_64BIT != 0 {
            true => entries
                .chunks_exact(8)
                .map(|e| u64::from(be32(e, 0)) << 32 | u64::from(be32(e, 4)))
                .collect(),
            false => entries.chunks_exact(4).map(|e| u64::from(be32(e, 0))).collect(),
        }
    }

    fn has_checksums(&self) -> bool {
        self.incompat & (INCOMPAT_CSUM_V2 | INCOMPAT_CSUM_V3) != 0
    }

    fn block_checksum_ok(&self, block: &[u8]) -> bool {
        let body = block.len() - 4;
        !self.has_checksums() || crc32c(&[&self.checksum_seed, &block[..body], &[0; 4]]) == be32(block, body)
    }

    fn commit_checksum_ok(&self, block: &[u8]) -> bool {
        !self.has_checksums()
            || crc32c(&[&self.checksum_seed, &block[..16], &[0; 4], &block[20..]]) == be32(block, 16)
    }

    /// The block `by` further in the ring; `by` is less than its length.
    fn next(&self, at: u32, by: u32) -> u32 {
        let (len, offset) = (u64::from(self.last - self.first), u64::from(at - self.first));
        // Fits: the remainder is below the length, which is a u32.
        self.first + ((offset + u64::from(by)) % len) as u32
    }

    /// Filesystem block of block `n` of the journal file.
    fn file_block(&self, n: u32) -> Option<u64> {
        let run = self
            .extents
            .iter()
            .find(|run| n >= run.first && n - run.first < run.len)?;
        run.block.checked_add(u64::from(n - run.first))
    }

    fn block(&self, n: u32) -> Option<Vec<u8>> {
        self.fs_block(self.file_block(n)?)
    }

    fn fs_block(&self, block: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![0; self.block_size as usize];
        self.extent
            .read_at(block.checked_mul(self.block_size)?, &mut bytes)
            .ok()?;
        Some(bytes)
    }
}

/// The journal's inode, from the table of its group: no journal changes its own inode.
fn journal_inode(extent: &Extent, fs: &Superblock) -> Option<[u8; 128]> {
    let read = |at: u64, dst: &mut [u8]| extent.read_at(at, dst).ok();
    extent.bytes(fs.inode_location(fs.journal_inode()?, read)?)
}

fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}
