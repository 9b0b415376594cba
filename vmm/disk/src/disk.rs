//! An open image, shared by everybody who serves it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::geometry::{self, Align};
use crate::{DiskReader, ErrorPolicy, Geometry, Options};

/// An open disk image: a handle, cheap to clone, usable from every thread. The descriptor is closed with the last one
/// and the last [`Engine`](crate::Engine) it is attached to.
#[derive(Clone, Debug)]
pub struct Disk(Arc<Image>);

#[derive(Debug)]
struct Image {
    file: File,
    /// All but the size, which is beside it.
    geometry: Geometry,
    size: AtomicU64,
    policy: ErrorPolicy,
    /// Engines it is attached to.
    engines: AtomicU32,
    /// The error of a flush that may have lost what was written before it, else 0.
    lost: AtomicI32,
}

/// A range of a disk that is all allocated or all hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte: what was asked for.
    pub offset: u64,
    /// Bytes, not 0.
    pub len: u64,
    /// Whether the volume has storage for it. Without, it reads as zeroes.
    pub allocated: bool,
}

impl Disk {
    /// Opens a raw image: a regular file or a block device.
    ///
    /// # Errors
    /// `InvalidInput` names what does not fit: neither file nor block device, a size that is 0 or not whole
    /// logical blocks, block sizes the volume cannot do, an access mode or `O_DIRECT` state that contradicts
    /// `options`.
    pub fn open_raw(image: OwnedFd, options: Options) -> io::Result<Self> {
        let file = File::from(image);
        let geometry = Geometry::probe(&file, options)?;
        Ok(Self(Arc::new(Image {
            file,
            geometry,
            size: AtomicU64::new(geometry.size),
            policy: options.error_policy,
            engines: AtomicU32::new(0),
            lost: AtomicI32::new(0),
        })))
    }

    /// Size, block sizes and what the disk can do.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size(),
            ..self.0.geometry
        }
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.size.load(Ordering::Relaxed)
    }

    /// What an I/O error does, unless an engine is told otherwise.
    #[must_use]
    pub fn error_policy(&self) -> ErrorPolicy {
        self.0.policy
    }

    /// Takes over the size that the file or block device has now, in whole blocks, and returns what the disk looks
    /// like then. Everybody who serves it judges requests by it from then on; those already begun are not cut off.
    ///
    /// # Errors
    /// There is nothing left of it (`InvalidInput`), or the kernel's; the size stays what it was.
    pub fn refresh(&self) -> io::Result<Geometry> {
        let size = geometry::refreshed_size(&self.0.file, &self.0.geometry)?;
        self.0.size.store(size, Ordering::Relaxed);
        Ok(self.geometry())
    }

    /// The extent that begins at byte `offset`. May wait for the volume's metadata.
    ///
    /// # Errors
    /// `InvalidInput` beyond the disk's end; else the kernel's.
    pub fn extent(&self, offset: u64) -> io::Result<Extent> {
        let size = self.size();
        if offset >= size {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let data = self.seek(offset, libc::SEEK_DATA)?.unwrap_or(size).min(size);
        if data > offset {
            let (len, allocated) = (data - offset, false);
            return Ok(Extent {
                offset,
                len,
                allocated,
            });
        }
        // One that moved before we looked again still has a byte.
        let hole = self.seek(offset, libc::SEEK_HOLE)?.unwrap_or(size).min(size);
        Ok(Extent {
            offset,
            len: hole.saturating_sub(offset).max(1),
            allocated: true,
        })
    }

    /// Where a seek lands; nowhere if there is none of its kind up to the end.
    fn seek(&self, offset: u64, whence: i32) -> io::Result<Option<u64>> {
        let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: lseek takes no pointer. Nobody uses the descriptor's position.
        let at = unsafe { libc::lseek(self.0.file.as_raw_fd(), offset, whence) };
        match u64::try_from(at) {
            Ok(at) => Ok(Some(at)),
            Err(_) => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
                error => Err(error),
            },
        }
    }

    /// A handle for synchronous reads, usable while engines serve the disk.
    #[must_use]
    pub fn reader(&self) -> DiskReader {
        DiskReader::new(self.clone())
    }

    /// Whether only one engine at a time can serve it: its blocks are smaller than what direct I/O can write, and
    /// requests that rewrite parts of a block are kept apart within an engine only.
    #[must_use]
    pub fn needs_one_engine(&self) -> bool {
        self.0.geometry.align.offset > u64::from(self.0.geometry.logical_block)
    }

    pub(crate) fn file(&self) -> &File {
        &self.0.file
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.file.as_fd()
    }

    pub(crate) fn align(&self) -> Align {
        self.0.geometry.align
    }

    /// Notes the error of a flush after which nobody can know what is stable.
    pub(crate) fn lose(&self, errno: i32) {
        self.0.lost.store(errno, Ordering::Relaxed);
    }

    /// See [`Disk::lose`]; 0 if it never came to that.
    pub(crate) fn lost(&self) -> i32 {
        self.0.lost.load(Ordering::Relaxed)
    }
}

/// A disk's place in an engine.
#[derive(Debug)]
pub(crate) struct Attachment(Disk);

impl Attachment {
    pub fn new(disk: &Disk) -> io::Result<Self> {
        let before = disk.0.engines.fetch_add(1, Ordering::Relaxed);
        let attachment = Self(disk.clone());
        if before > 0 && disk.needs_one_engine() {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        Ok(attachment)
    }

    pub fn disk(&self) -> &Disk {
        &self.0
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.0.0.engines.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
impl Disk {
    /// A disk of that geometry on no file of its own.
    pub(crate) fn made_up(geometry: Geometry, policy: ErrorPolicy) -> Self {
        Self(Arc::new(Image {
            file: File::open("/dev/null").unwrap(),
            size: AtomicU64::new(geometry.size),
            geometry,
            policy,
            engines: AtomicU32::new(0),
            lost: AtomicI32::new(0),
        }))
    }

    pub(crate) fn set_size(&self, size: u64) {
        self.0.size.store(size, Ordering::Relaxed);
    }
}
