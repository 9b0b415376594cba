//! ext2, ext3 and ext4 through the `ext4-view` crate.
//!
//! The crate allocates by sizes that the superblock and symbolic links claim. So [`superblock`] checks the superblock
//! first, and this module resolves paths itself and checks the sizes of links before it reads them.

mod extents;
mod journal;
mod preallocated;
mod superblock;

use std::rc::Rc;

use ext4_view::{Ext4, Ext4Error, Ext4Read, Metadata};

use crate::source::{Cached, Extent};
use crate::volume::{MAX_NAMES, MAX_PATH, Sink, Volume, VolumeError, normalise, stream_chunks};
use journal::JournalOverlay;
use preallocated::PreallocatedFile;
use superblock::{SUPERBLOCK_SIZE, SUPERBLOCK_START, Superblock};

/// Maximum size of a directory in bytes: about 100,000 names.
const MAX_DIR: u64 = 16 << 20;
/// Symbolic links followed for one path, as in Linux.
const MAX_LINKS: usize = 40;

/// An ext filesystem, read only, as it is after its journal was replayed.
pub(crate) struct Ext4Volume {
    fs: Ext4,
    reader: Rc<Reader>,
    uuid: String,
    label: String,
    note: Option<String>,
}

impl Ext4Volume {
    /// Opens the filesystem on `extent`.
    pub(crate) fn open(extent: Extent) -> Result<Self, VolumeError> {
        let superblock = Superblock::read(&extent)?;
        let mut note = None;
        let journal = if superblock.needs_recovery() {
            JournalOverlay::load(&extent, &superblock).unwrap_or_else(|why| {
                note = Some(format!(
                    "its journal was not replayed ({why}), so its last changes may be missing"
                ));
                JournalOverlay::default()
            })
        } else {
            JournalOverlay::default()
        };
        if let Some(rest) = journal.rest {
            note = Some(format!(
                "its journal was replayed up to {rest} only, so its last changes may be missing"
            ));
        }
        let reader = Rc::new(Reader::new(extent, journal)?);
        let fs = Ext4::load(Box::new(SharedReader(Rc::clone(&reader)))).map_err(failed)?;
        let uuid = fs.uuid().to_string();
        let label = fs.label().to_str().unwrap_or_default().to_owned();
        Ok(Self {
            fs,
            reader,
            uuid,
            label,
            note,
        })
    }

    /// Follows `path` to something that is not a symbolic link; its path then contains none.
    fn resolve(&self, path: &str) -> Result<(String, Metadata), VolumeError> {
        let mut left = normalise(path).ok_or(VolumeError::NotFound)?;
        let mut done = String::from("/");
        let mut metadata = self.metadata(&done)?;
        let mut links = 0;
        while let Some(rest) = left.strip_prefix('/').filter(|rest| !rest.is_empty()) {
            if !metadata.is_dir() || metadata.len() > MAX_DIR {
                return Err(VolumeError::NotFound);
            }
            let (name, rest) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let child = format!("{}/{name}", done.trim_end_matches('/'));
            metadata = self.metadata(&child)?;
            if !metadata.is_symlink() {
                left = rest.to_owned();
                done = child;
                continue;
            }
            links += 1;
            if links > MAX_LINKS || metadata.len() > MAX_PATH as u64 {
                return Err(VolumeError::NotFound);
            }
            let target = self.fs.read_link(child.as_str()).map_err(failed)?;
            let target = target.to_str().map_err(|_| VolumeError::NotFound)?;
            let whole = match target.starts_with('/') {
                true => format!("{target}{rest}"),
                // Of the path walked so far no part is a link, so `..` can be resolved as text.
                false => format!("{done}/{target}{rest}"),
            };
            left = normalise(&whole).ok_or(VolumeError::NotFound)?;
            done = "/".to_owned();
            metadata = self.metadata(&done)?;
        }
        Ok((done, metadata))
    }

    fn metadata(&self, path: &str) -> Result<Metadata, VolumeError> {
        self.fs.symlink_metadata(path).map_err(failed)
    }
}

impl Volume for Ext4Volume {
    fn uuid(&self) -> &str {
        &self.uuid
    }

    fn label(&self) -> &str {
        &self.label
    }

    fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    fn list(&self, path: &str) -> Result<Vec<String>, VolumeError> {
        let (path, metadata) = self.resolve(path)?;
        if !metadata.is_dir() || metadata.len() > MAX_DIR {
            return Err(VolumeError::NotFound);
        }
        let mut names = Vec::new();
        for entry in self.fs.read_dir(path.as_str()).map_err(failed)?.take(MAX_NAMES) {
            let entry = entry.map_err(failed)?;
            if let Ok(name) = entry.file_name().as_str() {
                names.push(name.to_owned());
            }
        }
        names.retain(|name| name != "." && name != "..");
        Ok(names)
    }

    fn size(&self, path: &str) -> Result<u64, VolumeError> {
        let (_, metadata) = self.resolve(path)?;
        if metadata.file_type().is_regular_file() {
            Ok(metadata.len())
        } else {
            Err(VolumeError::NotAFile)
        }
    }

    fn stream(&self, path: &str, size: u64, sink: &mut Sink<'_>) -> Result<(), VolumeError> {
        let (path, metadata) = self.resolve(path)?;
        if let Some(file) = PreallocatedFile::open(&self.reader, &path, metadata.len()) {
            let mut at = 0;
            return stream_chunks(size, sink, |buf| {
                let count = (buf.len() as u64).min(metadata.len() - at) as usize;
                let read = file.read(at, &mut buf[..count]);
                read.map_err(|error| VolumeError::Filesystem(error.to_string()))?;
                at += count as u64;
                Ok(count)
            });
        }
        let mut file = self.fs.open(path.as_str()).map_err(failed)?;
        stream_chunks(size, sink, |buf| file.read_bytes(buf).map_err(failed))
    }
}

fn failed(error: Ext4Error) -> VolumeError {
    match error {
        Ext4Error::NotFound | Ext4Error::NotADirectory => VolumeError::NotFound,
        Ext4Error::IsADirectory | Ext4Error::IsASpecialFile => VolumeError::NotAFile,
        other => VolumeError::Filesystem(other.to_string()),
    }
}

/// The filesystem as the crate sees it: blocks that the journal holds newer copies of replaced, and a superblock
/// without features that reading does not need.
struct Reader {
    source: Cached,
    /// The superblock after the journal was replayed.
    newest: Superblock,
    superblock: [u8; SUPERBLOCK_SIZE],
    journal: JournalOverlay,
}

impl Reader {
    fn new(extent: Extent, journal: JournalOverlay) -> Result<Self, VolumeError> {
        let len = extent.len();
        let source = Cached::new(extent);
        // The journal may hold a newer superblock too.
        let mut newest = [0; SUPERBLOCK_SIZE];
        blocks(&source, &journal, SUPERBLOCK_START, &mut newest)
            .map_err(|e| VolumeError::Filesystem(e.to_string()))?;
        let newest = Superblock::parse(newest, len)?;
        Ok(Self {
            source,
            superblock: newest.for_reading(),
            newest,
            journal,
        })
    }

    /// Reads with the journal's copies in place of the blocks they replace.
    fn blocks(&self, start: u64, dst: &mut [u8]) -> std::io::Result<()> {
        blocks(&self.source, &self.journal, start, dst)
    }
}

fn blocks(source: &Cached, journal: &JournalOverlay, start: u64, dst: &mut [u8]) -> std::io::Result<()> {
    source.read_at(start, dst)?;
    journal.patch(start, dst, |offset, dst| source.read_at(offset, dst))
}

fn le16(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

fn le32(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// The reader, for the crate.
struct SharedReader(Rc<Reader>);

impl Ext4Read for SharedReader {
    fn read(
        &mut self,
        start: u64,
        dst: &mut [u8],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync + 'static>> {
        let Self(reader) = self;
        reader.blocks(start, dst)?;
        let end = start.saturating_add(dst.len() as u64);
        let sb_end = SUPERBLOCK_START + SUPERBLOCK_SIZE as u64;
        if start < sb_end && end > SUPERBLOCK_START {
            let (from, to) = (start.max(SUPERBLOCK_START), end.min(sb_end));
            let bytes =
                &reader.superblock[(from - SUPERBLOCK_START) as usize..(to - SUPERBLOCK_START) as usize];
            dst[(from - start) as usize..(to - start) as usize].copy_from_slice(bytes);
        }
        Ok(())
    }
}
