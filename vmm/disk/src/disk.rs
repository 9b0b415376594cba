//! An open image, shared by everybody who serves it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::geometry::{self, Align};
use crate::{DiskOptions, DiskReader, ErrorPolicy, Geometry, ImageFormat, qcow2};

/// An open disk image: a handle, cheap to clone, usable from every thread. The descriptor is closed with the last one
/// and the last [`Engine`](crate::Engine) it is attached to.
#[derive(Clone, Debug)]
pub struct Disk(Arc<DiskState>);

#[derive(Debug)]
struct DiskState {
    backend: ImageBackend,
    /// All but the size, which is beside it.
    geometry: Geometry,
    size: AtomicU64,
    policy: ErrorPolicy,
    /// Engines it is attached to.
    engines: AtomicU32,
    /// The error of a flush that may have lost what was written before it, else 0.
    lost: AtomicI32,
}

/// What holds a disk's content.
#[derive(Debug)]
pub(crate) enum ImageBackend {
    /// A file or block device, byte for byte.
    File(File),
    Qcow2(Arc<qcow2::Qcow2Image>),
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
    pub fn open_raw(image: OwnedFd, options: DiskOptions) -> io::Result<Self> {
        let file = File::from(image);
        let geometry = Geometry::probe(&file, options)?;
        Ok(Self::new(
            ImageBackend::File(file),
            geometry,
            options.error_policy,
        ))
    }

    /// Opens a qcow2 image, with threads of its own to serve it. What `base` holds shows where the image holds
    /// nothing, or zeroes if there is none; `base` is never written to, and its format never guessed.
    ///
    /// The image may not name any other file, nor may the base: what there is to a disk comes as descriptors. An
    /// overlay by [`Disk::create_overlay`] does not.
    ///
    /// # Errors
    /// `InvalidInput`: the descriptors do not fit `options` ([`CacheMode::None`](crate::CacheMode::None) never does: the page
    /// cache serves qcow2) or each other. `InvalidData` says what it is about the image: it names another file, is
    /// encrypted or marked as corrupt, uses a feature that is unknown, holds snapshots and is to be written to,
    /// would take too much memory, or is no good. Else the kernel's.
    pub fn open_qcow2(
        image: OwnedFd,
        base: Option<(OwnedFd, ImageFormat)>,
        options: DiskOptions,
    ) -> io::Result<Self> {
        let base = base.map(|(fd, format)| (File::from(fd), format));
        let (image, geometry) = qcow2::Qcow2Image::open(File::from(image), base, options)?;
        let backend = ImageBackend::Qcow2(Arc::new(image));
        Ok(Self::new(backend, geometry, options.error_policy))
    }

    /// Makes of an empty file a qcow2 overlay over `base`, as large as that, and opens it as [`Disk::open_qcow2`] does.
    /// What a qcow2 base says of itself is read by nobody before.
    ///
    /// # Errors
    /// As those of [`Disk::open_qcow2`]; they are the base's, unless they begin with "its overlay".
    pub fn new_overlay(
        image: OwnedFd,
        base: (OwnedFd, ImageFormat),
        options: DiskOptions,
    ) -> io::Result<Self> {
        let (image, geometry) =
            qcow2::Qcow2Image::overlay(File::from(image), File::from(base.0), base.1, options)?;
        let backend = ImageBackend::Qcow2(Arc::new(image));
        Ok(Self::new(backend, geometry, options.error_policy))
    }

    /// Makes of an empty file a qcow2 overlay that holds nothing yet, for a disk of `size` bytes, a multiple of 512.
    /// It names no base: that is for [`Disk::open_qcow2`] to be told.
    ///
    /// # Errors
    /// `InvalidInput`: the file is not empty, the size no good. Else the kernel's.
    pub fn create_overlay(file: OwnedFd, size: u64) -> io::Result<()> {
        qcow2::create(&Arc::new(File::from(file)), size, qcow2::CLUSTER)
    }

    fn new(backend: ImageBackend, geometry: Geometry, policy: ErrorPolicy) -> Self {
        Self(Arc::new(DiskState {
            backend,
            geometry,
            size: AtomicU64::new(geometry.size),
            policy,
            engines: AtomicU32::new(0),
            lost: AtomicI32::new(0),
        }))
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
    /// There is nothing left of it (`InvalidInput`), it is a qcow2 image (`Unsupported`), or the kernel's; the size
    /// stays what it was.
    pub fn refresh(&self) -> io::Result<Geometry> {
        let ImageBackend::File(file) = &self.0.backend else {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "a qcow2 image is not resized",
            ));
        };
        let size = geometry::refreshed_size(file, &self.0.geometry)?;
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
        let file = match &self.0.backend {
            ImageBackend::File(file) => file,
            ImageBackend::Qcow2(image) => return image.extent(offset),
        };
        let data = seek(file, offset, libc::SEEK_DATA)?.unwrap_or(size).min(size);
        if data > offset {
            let (len, allocated) = (data - offset, false);
            return Ok(Extent {
                offset,
                len,
                allocated,
            });
        }
        // One that moved before we looked again still has a byte.
        let hole = seek(file, offset, libc::SEEK_HOLE)?.unwrap_or(size).min(size);
        Ok(Extent {
            offset,
            len: hole.saturating_sub(offset).max(1),
            allocated: true,
        })
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

    pub(crate) fn backend(&self) -> &ImageBackend {
        &self.0.backend
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

/// Where a seek lands; nowhere if there is none of its kind up to the end.
fn seek(file: &File, offset: u64, whence: i32) -> io::Result<Option<u64>> {
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: lseek takes no pointer. Nobody uses the descriptor's position.
    let at = unsafe { libc::lseek(file.as_raw_fd(), offset, whence) };
    match u64::try_from(at) {
        Ok(at) => Ok(Some(at)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
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
        Self::new(
            ImageBackend::File(File::open("/dev/null").unwrap()),
            geometry,
            policy,
        )
    }

    pub(crate) fn set_size(&self, size: u64) {
        self.0.size.store(size, Ordering::Relaxed);
    }
}
