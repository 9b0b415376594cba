//! Files with preallocated blocks that were never written, which read as zeros (`fallocate(2)`).
//!
//! `ext4-view` takes these blocks for data, and as many more that follow them on the filesystem. It does not say which
//! inode a file has, so this module finds it by the file's path.

use super::extents::{Run, runs};
use super::{MAX_DIR, Reader, le16, le32};

/// Maximum number of runs of a file: its tree takes 768 KiB.
const MAX_RUNS: usize = 1 << 16;
const ROOT: u64 = 2;
const INODE_SIZE: usize = 128;

const TYPE: u16 = 0xf000;
const DIRECTORY: u16 = 0x4000;
const REGULAR: u16 = 0x8000;

const FLAG_EXTENTS: u32 = 0x8_0000;

/// The part of an inode that every revision of the filesystem has.
struct Inode([u8; INODE_SIZE]);

impl Inode {
    fn has_type(&self, wanted: u16) -> bool {
        le16(&self.0, 0) & TYPE == wanted
    }

    fn size(&self) -> u64 {
        u64::from(le32(&self.0, 0x6c)) << 32 | u64::from(le32(&self.0, 0x4))
    }
}

/// The blocks of a file that has preallocated ones.
pub(super) struct PreallocatedFile<'a> {
    reader: &'a Reader,
    /// In the order of the file.
    runs: Vec<Run>,
}

impl<'a> PreallocatedFile<'a> {
    /// Opens the regular file of `size` bytes at `path`, which has no symbolic links. Returns `None` if it has no
    /// preallocated blocks, or cannot be found.
    pub(super) fn open(reader: &'a Reader, path: &str, size: u64) -> Option<Self> {
        let mut inode = inode(reader, ROOT)?;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            inode = child(reader, &inode, name.as_bytes())?;
        }
        if !inode.has_type(REGULAR) || inode.size() != size {
            return None;
        }
        let runs = runs_of(reader, &inode)?;
        let ascends = runs
            .windows(2)
            .all(|pair| u64::from(pair[0].first) + u64::from(pair[0].len) <= u64::from(pair[1].first));
        let has_preallocated = runs.iter().any(|run| run.unwritten);
        (ascends && has_preallocated).then_some(Self { reader, runs })
    }

    /// Reads the bytes from `start`; those without data are zeros.
    pub(super) fn read(&self, start: u64, dst: &mut [u8]) -> std::io::Result<()> {
        dst.fill(0);
        let block_size = self.reader.newest.block_size;
        let end = start + dst.len() as u64;
        let range = |run: &Run| {
            let first = u64::from(run.first) * block_size;
            (first, first + u64::from(run.len) * block_size)
        };
        let before = self.runs.partition_point(|run| range(run).1 <= start);
        for run in &self.runs[before..] {
            let (first, behind) = range(run);
            if first >= end {
                break;
            }
            if !run.unwritten {
                let (from, to) = (first.max(start), behind.min(end));
                let part = &mut dst[(from - start) as usize..(to - start) as usize];
                self.reader
                    .blocks(run.block * block_size + (from - first), part)?;
            }
        }
        Ok(())
    }
}

fn runs_of(reader: &Reader, inode: &Inode) -> Option<Vec<Run>> {
    if le32(&inode.0, 0x20) & FLAG_EXTENTS == 0 {
        return None;
    }
    let read = |number| block(reader, number);
    runs(&inode.0[0x28..0x28 + 60], reader.newest.blocks, MAX_RUNS, &read).ok()
}

fn block(reader: &Reader, number: u64) -> Option<Vec<u8>> {
    let block_size = reader.newest.block_size;
    let mut bytes = vec![0; block_size as usize];
    reader.blocks(number.checked_mul(block_size)?, &mut bytes).ok()?;
    Some(bytes)
}

fn inode(reader: &Reader, number: u64) -> Option<Inode> {
    let mut bytes = [0; INODE_SIZE];
    let read = |at: u64, dst: &mut [u8]| reader.blocks(at, dst).ok();
    let at = reader.newest.inode_location(number, read)?;
    reader.blocks(at, &mut bytes).ok()?;
    Some(Inode(bytes))
}

/// The inode of the entry `name` of a directory. The blocks of an index have entries too, which are not in use.
fn child(reader: &Reader, directory: &Inode, name: &[u8]) -> Option<Inode> {
    if !directory.has_type(DIRECTORY) || directory.size() > MAX_DIR {
        return None;
    }
    let blocks = runs_of(reader, directory)?.into_iter().flat_map(|run| {
        let len = if run.unwritten { 0 } else { run.len };
        run.block..run.block + u64::from(len)
    });
    for number in blocks.take((MAX_DIR / reader.newest.block_size) as usize) {
        let block = block(reader, number)?;
        let mut rest = &block[..];
        while rest.len() >= 8 {
            let (number, name_len) = (le32(rest, 0), usize::from(rest[6]));
            let len = match le16(rest, 4) {
                0 | 0xffff => rest.len(),
                len => usize::from(len),
            };
            if len < 8 || len > rest.len() {
                return None;
            }
            if number != 0 && rest[8..len].get(..name_len) == Some(name) {
                return inode(reader, number.into());
            }
            rest = &rest[len..];
        }
    }
    None
}
