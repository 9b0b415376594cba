//! The boot entry that was found, with its files ready to be streamed.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::disk::{FileRef, PartitionedDisk};
use crate::filesystem;
use crate::probe::FsKind;
use crate::selected_entry::SelectedEntry;
use crate::source::{Budget, Extent, ReadAt};
use crate::volume::VolumeError;

/// A kernel, its initrds and its command line, found on a disk.
#[derive(Clone, Debug)]
pub struct BootEntry {
    /// Title of the boot entry in the menu; may be empty.
    pub title: String,
    /// Source of the entry, such as `partition 1 (ext4), /boot/grub/grub.cfg, entry 'Debian GNU/Linux'`.
    pub source: String,
    /// Kernel command line, `root=` as it stands; no NUL or line break.
    pub command_line: String,
    /// Warnings for the user, such as a damaged primary GPT.
    pub notes: Vec<String>,
    kernel: BootFiles,
    initrd: Option<BootFiles>,
}

impl BootEntry {
    pub(crate) fn new(disk: &PartitionedDisk, source: &Arc<dyn ReadAt>, plan: SelectedEntry) -> Option<Self> {
        let files = |refs: &[FileRef]| {
            let files: Option<Vec<File>> = refs.iter().map(|r| File::new(disk, r)).collect();
            files.map(|files| BootFiles {
                disk: Arc::clone(source),
                files,
            })
        };
        let mut notes = disk.notes.clone();
        notes.extend(disk.partitions.iter().enumerate().filter_map(|(index, m)| {
            let note = m.volume.as_ref().ok()?.note()?;
            Some(format!("{}: {note}", disk.describe(index)))
        }));
        Some(Self {
            kernel: files(std::slice::from_ref(&plan.kernel))?,
            initrd: if plan.initrds.is_empty() {
                None
            } else {
                Some(files(&plan.initrds)?)
            },
            title: plan.title,
            source: plan.source,
            command_line: plan.command_line,
            notes,
        })
    }

    /// The kernel file.
    pub fn kernel(&self) -> &BootFiles {
        &self.kernel
    }

    /// The initrds one after the other, each padded with zeros to 4 bytes; none if the entry has none.
    pub fn initrd(&self) -> Option<&BootFiles> {
        self.initrd.as_ref()
    }
}

/// One or more files of a disk, read as one stream.
#[derive(Clone)]
pub struct BootFiles {
    disk: Arc<dyn ReadAt>,
    files: Vec<File>,
}

#[derive(Clone, Debug)]
struct File {
    /// Position of its filesystem on the disk: first byte and length in bytes.
    place: (u64, u64),
    content: FsKind,
    path: String,
    size: u64,
}

/// Error of reading a file.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The filesystem or the disk failed.
    #[error("{path}: {reason}")]
    File {
        /// Path on its filesystem.
        path: String,
        /// Error text.
        reason: String,
    },
    /// The sink failed.
    #[error("the file's content could not be written")]
    Sink(#[source] std::io::Error),
}

/// Alignment of concatenated initrds: the kernel looks for the next cpio archive at multiples of this.
const ALIGNMENT: u64 = 4;
/// Read budget for a file, in addition to [`AMPLIFICATION`] times its size.
const BUDGET: u64 = 1 << 30;
/// Bytes that may be read for a byte of a file: a file in fragments of 4 KiB is read in windows of 64 KiB.
const AMPLIFICATION: u64 = 16;

impl BootFiles {
    /// Bytes that [`read_into`](Self::read_into) gives.
    pub fn size(&self) -> u64 {
        self.files.iter().map(|f| self.padded(f.size)).sum()
    }

    /// Paths on their filesystems, for messages.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|f| f.path.as_str())
    }

    /// Size with padding; a single file is not padded.
    fn padded(&self, size: u64) -> u64 {
        if self.files.len() > 1 {
            size.next_multiple_of(ALIGNMENT)
        } else {
            size
        }
    }

    /// Passes all bytes in order to `sink`, in pieces of 256 KiB except for the last of each file.
    ///
    /// Opens the filesystem again, so that the state of [`find`](crate::find) is not kept in memory.
    ///
    /// # Errors
    /// [`ReadError::Sink`] has the error of the sink; other errors name the damaged file.
    pub fn read_into(&self, sink: &mut dyn FnMut(&[u8]) -> std::io::Result<()>) -> Result<(), ReadError> {
        for file in &self.files {
            file.stream(&self.disk, sink).map_err(|e| match e {
                VolumeError::Sink(e) => ReadError::Sink(e),
                other => ReadError::File {
                    path: file.path.clone(),
                    reason: other.to_string(),
                },
            })?;
            let padding = (self.padded(file.size) - file.size) as usize;
            if padding > 0 {
                sink(&[0; ALIGNMENT as usize][..padding]).map_err(ReadError::Sink)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for BootFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BootFiles")
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl File {
    fn new(disk: &PartitionedDisk, file: &FileRef) -> Option<Self> {
        let opened = disk.partitions.get(file.volume)?;
        let extent = opened.partition.extent.as_ref()?;
        Some(Self {
            place: (extent.start(), extent.len()),
            content: opened.content,
            path: file.path.clone(),
            size: disk.size(file).ok()?,
        })
    }

    fn stream(
        &self,
        disk: &Arc<dyn ReadAt>,
        sink: &mut dyn FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), VolumeError> {
        let budget = Budget::new(self.size.saturating_mul(AMPLIFICATION).saturating_add(BUDGET));
        let (start, len) = self.place;
        let extent = Extent::whole(Arc::clone(disk), budget)
            .slice(start, len)
            .ok_or(VolumeError::NotFound)?;
        filesystem::open(extent, self.content)?.stream(&self.path, self.size, sink)
    }
}
