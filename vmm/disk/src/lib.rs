//! Disk images as the storage devices see them: one asynchronous contract ([`DiskQueue`]), whatever the
//! format and whichever way the kernel offers to do the I/O.
//!
//! A [`Disk`] is opened from a descriptor somebody else opened. It gives out as many [`DiskQueue`]s as
//! it was told to make, each owned by one worker, and [`DiskReader`]s for who only wants to look.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

mod aligned;
mod executor;
mod geometry;
mod operation;
mod queue;
mod raw;
mod reader;
mod threads;
mod uring;

pub use geometry::Geometry;
pub use queue::{Buffer, Completion, DiskQueue, Request};
pub use reader::DiskReader;

use raw::RawQueue;

/// Bytes of a sector, the unit of disk sizes and of every offset a guest can name.
pub const SECTOR: u64 = 512;

/// When a completed write is safe from a power cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// After a flush. The host's page cache is not used: the descriptor must have been opened with `O_DIRECT`.
    None,
    /// At once: every write is on stable storage before it completes.
    Writethrough,
    /// After a flush.
    #[default]
    Writeback,
}

/// Who does the I/O.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// io_uring, or threads where the kernel refuses it.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// A few threads with blocking system calls, started at once: whoever drops privileges does it before.
    Threads,
}

/// How to open a disk.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Refuse everything that changes the image.
    pub read_only: bool,
    /// When writes become stable.
    pub cache: Cache,
    /// Independent queues to make, at least 1. Fewer are made where requests must be ordered between queues.
    pub queues: u16,
    /// Who does the I/O.
    pub engine: Engine,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            read_only: false,
            cache: Cache::default(),
            queues: 1,
            engine: Engine::default(),
        }
    }
}

/// An open disk image.
#[derive(Debug)]
pub struct Disk {
    geometry: Geometry,
    file: Arc<File>,
    queues: Vec<Box<dyn DiskQueue>>,
}

impl Disk {
    /// Opens a raw image: a regular file or a block device. Makes every kernel object the disk will need,
    /// so it must run before the seccomp filter is in place.
    ///
    /// # Errors
    /// `InvalidInput` names what does not fit: neither file nor block device, a size that is 0 or not a
    /// multiple of 512 bytes, an access mode or `O_DIRECT` state that contradicts `options`.
    pub fn open_raw(image: OwnedFd, options: Options) -> io::Result<Self> {
        let file = Arc::new(File::from(image));
        let geometry = Geometry::probe(&file, options)?;
        // Requests that rewrite parts of blocks are kept apart within a queue only.
        let queues = if geometry.align.offset > SECTOR {
            1
        } else {
            options.queues.max(1)
        };
        let queues = (0..queues)
            .map(|_| Ok(Box::new(RawQueue::new(&file, geometry, options.engine)?) as Box<dyn DiskQueue>))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            geometry,
            file,
            queues,
        })
    }

    /// Size, block sizes and what the disk can do.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// A handle for synchronous reads, usable while the queues are in use.
    #[must_use]
    pub fn reader(&self) -> DiskReader {
        DiskReader::new(Arc::clone(&self.file), self.geometry)
    }

    /// The queues. Empty at the second call.
    pub fn take_queues(&mut self) -> Vec<Box<dyn DiskQueue>> {
        std::mem::take(&mut self.queues)
    }
}
