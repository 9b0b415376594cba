//! The extent tree of a file (kernel documentation, ext4/ifork).

use super::{le16, le32};

const MAGIC: u16 = 0xf30a;
/// Length of the header of a node, and of each entry.
const ENTRY: usize = 12;
const MAX_LEVEL: u16 = 5;
/// A length above this marks a preallocated run of (length − this) blocks, which reads as zeros.
const MAX_LEN: u16 = 0x8000;

/// Blocks of a file that are adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The first block in the file.
    pub first: u32,
    /// The first block on the filesystem.
    pub block: u64,
    /// Number of blocks, not 0.
    pub len: u32,
    pub unwritten: bool,
}

/// An error of a tree.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TreeError {
    Damaged,
    /// It has more runs than the caller wants.
    TooLarge,
}

/// The runs of the tree with this root, at most `max`, on a filesystem of `blocks` blocks. `read` returns one of its
/// blocks.
pub(super) fn runs(
    root: &[u8],
    blocks: u64,
    max: usize,
    read: &dyn Fn(u64) -> Option<Vec<u8>>,
) -> Result<Vec<Run>, TreeError> {
    let mut runs = Vec::new();
    Tree { blocks, max, read }.walk(root, None, &mut runs)?;
    Ok(runs)
}

struct Tree<'a> {
    blocks: u64,
    max: usize,
    read: &'a dyn Fn(u64) -> Option<Vec<u8>>,
}

impl Tree<'_> {
    /// A child must be one level lower than its parent.
    fn walk(&self, node: &[u8], expected: Option<u16>, runs: &mut Vec<Run>) -> Result<(), TreeError> {
        let (magic, entries, level) = (le16(node, 0), usize::from(le16(node, 2)), le16(node, 6));
        if magic != MAGIC
            || level > MAX_LEVEL
            || expected.is_some_and(|expected| expected != level)
            || (entries + 1) * ENTRY > node.len()
        {
            return Err(TreeError::Damaged);
        }
        for entry in node[ENTRY..].chunks_exact(ENTRY).take(entries) {
            if runs.len() >= self.max {
                return Err(TreeError::TooLarge);
            }
            if level == 0 {
                runs.push(self.run(entry)?);
                continue;
            }
            let block = u64::from(le32(entry, 4)) | u64::from(le16(entry, 8)) << 32;
            let child = (self.read)(block).ok_or(TreeError::Damaged)?;
            let before = runs.len();
            self.walk(&child, Some(level - 1), runs)?;
            if runs.len() == before {
                return Err(TreeError::Damaged);
            }
        }
        Ok(())
    }

    fn run(&self, entry: &[u8]) -> Result<Run, TreeError> {
        let len = le16(entry, 4);
        let unwritten = len > MAX_LEN;
        let run = Run {
            first: le32(entry, 0),
            block: u64::from(le32(entry, 8)) | u64::from(le16(entry, 6)) << 32,
            len: u32::from(if unwritten { len - MAX_LEN } else { len }),
            unwritten,
        };
        match run.len > 0 && run.block + u64::from(run.len) <= self.blocks {
            true => Ok(run),
            false => Err(TreeError::Damaged),
        }
    }
}
