//! An open disk image.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::counters::{DiskCounters, DiskTotals, EngineTotals};
use crate::discard_thread::DiscardThread;
use crate::extent::Extent;
use crate::geometry::{self, Align};
use crate::syncs::Syncs;
use crate::{DiskOptions, ErrorPolicy, Geometry, ImageFormat, qcow2};

/// An open disk image: a handle, cheap to clone, usable from every thread. The descriptor is closed when the last
/// handle and the last [`Engine`](crate::Engine) that serves it are dropped.
#[derive(Clone, Debug)]
pub struct Disk(Arc<DiskState>);

#[derive(Debug)]
struct DiskState {
    backend: ImageBackend,
    /// The size in it is the one at open; `size` has the current one.
    geometry: Geometry,
    size: AtomicU64,
    policy: ErrorPolicy,
    /// Engines that serve the disk.
    engines: AtomicU32,
    /// Error number of a flush after which earlier writes may be lost, else 0.
    flush_error: AtomicI32,
    syncs: Syncs,
    totals: DiskTotals,
}

/// Storage of a disk's content.
#[derive(Debug)]
pub(crate) enum ImageBackend {
    /// A regular file or block device in raw format.
    File(File),
    /// A block device that is written to, with the thread that discards.
    Device(File, Arc<DiscardThread>),
    Qcow2(Arc<qcow2::Qcow2Image>),
}

impl ImageBackend {
    /// True if a failed [`IoCall::Sync`](crate::io_backend::IoCall::Sync) got as far as an fdatasync that failed.
    pub fn sync_failed(&self) -> bool {
        match self {
            Self::File(_) | Self::Device(..) => true,
            Self::Qcow2(image) => image.sync_failed(),
        }
    }

    /// Unit in bytes that a discard may cover.
    pub fn discard_block(&self) -> u64 {
        match self {
            Self::File(_) | Self::Qcow2(_) => 1,
            Self::Device(_, discards) => discards.block(),
        }
    }
}

impl Disk {
    /// Opens a raw image: a regular file or a block device. Starts the thread that discards a block device.
    ///
    /// # Errors
    /// `InvalidInput`: the descriptor is neither file nor block device, its size is 0 or not a multiple of the logical
    /// block, the volume cannot have these block sizes, or the access mode or `O_DIRECT` contradicts `options`. The
    /// text says which. Else the kernel's error.
    pub fn open_raw(image: OwnedFd, options: DiskOptions) -> io::Result<Self> {
        let file = File::from(image);
        let geometry = Geometry::probe(&file, options)?;
        let backend = match geometry::discard_block(&file)?.filter(|_| !options.read_only) {
            Some(block) => ImageBackend::Device(file, Arc::new(DiscardThread::new(block)?)),
            None => ImageBackend::File(file),
        };
        Ok(Self::new(backend, geometry, options.error_policy))
    }

    /// Opens a qcow2 image and starts the threads that serve it. Clusters that the image does not hold read from
    /// `base`, or as zeroes without one. `base` is never written to, and its format never guessed.
    ///
    /// Neither the image nor the base may name another file: every file comes as a descriptor. An overlay from
    /// [`Disk::create_overlay`] names none.
    ///
    /// # Errors
    /// `InvalidInput`: the descriptors contradict `options` or each other. [`CacheMode::None`](crate::CacheMode::None)
    /// is not available: qcow2 needs the page cache.
    /// `InvalidData`: the image names another file, is encrypted, marked as corrupt or damaged, uses an unknown
    /// feature, has snapshots and is opened for writing, would take too much memory, or is shorter than the clusters
    /// that its tables name. The text says which. Else the kernel's error.
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

    /// Formats an empty file as a qcow2 overlay over `base`, of the same size, and opens it as [`Disk::open_qcow2`]
    /// does. This is the first time that the header of a qcow2 base is read.
    ///
    /// # Errors
    /// As [`Disk::open_qcow2`]. An error is about the base unless it begins with "its overlay".
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

    /// Formats an empty file as an empty qcow2 overlay for a disk of `size` bytes, a multiple of 512. It names no base:
    /// pass that to [`Disk::open_qcow2`].
    ///
    /// # Errors
    /// `InvalidInput`: the file is not empty, or the size is not supported. Else the kernel's error.
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
            flush_error: AtomicI32::new(0),
            syncs: Syncs::default(),
            totals: DiskTotals::default(),
        }))
    }

    /// Size, block sizes and capabilities of the disk.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size(),
            ..self.0.geometry
        }
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.size.load(Ordering::Relaxed)
    }

    /// Counters of the requests that all engines have completed.
    #[must_use]
    pub fn counters(&self) -> DiskCounters {
        self.0.totals.read()
    }

    /// The error policy, unless an engine overrides it.
    #[must_use]
    pub fn error_policy(&self) -> ErrorPolicy {
        self.0.policy
    }

    /// Reads the size of the file or block device again, rounds it down to whole blocks, and returns the new geometry.
    /// Every engine checks new requests against it. Requests in flight continue.
    ///
    /// # Errors
    /// `InvalidInput`: less than a block is left. `Unsupported`: it is a qcow2 image. Else the kernel's error. The size
    /// does not change then.
    pub fn refresh(&self) -> io::Result<Geometry> {
        let (ImageBackend::File(file) | ImageBackend::Device(file, _)) = &self.0.backend else {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "a qcow2 image is not resized",
            ));
        };
        let size = geometry::refreshed_size(file, &self.0.geometry)?;
        self.0.size.store(size, Ordering::Relaxed);
        Ok(self.geometry())
    }

    /// Writes to the image's file what this process holds of it: the tables of a qcow2 image. A copy of the file is
    /// complete then, if no engine serves the disk meanwhile. Blocks.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn write_back(&self) -> io::Result<()> {
        match &self.0.backend {
            ImageBackend::File(_) | ImageBackend::Device(..) => Ok(()),
            ImageBackend::Qcow2(image) => image.write_back(),
        }
    }

    /// The extent that begins at byte `offset`. May block to read the volume's metadata.
    ///
    /// # Errors
    /// `InvalidInput`: `offset` is behind the end of the disk. Else the kernel's error.
    pub fn extent(&self, offset: u64) -> io::Result<Extent> {
        let size = self.size();
        if offset >= size {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let file = match &self.0.backend {
            ImageBackend::File(file) | ImageBackend::Device(file, _) => file,
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
        // If the hole moved since the first seek, the extent still has a byte.
        let hole = seek(file, offset, libc::SEEK_HOLE)?.unwrap_or(size).min(size);
        Ok(Extent {
            offset,
            len: hole.saturating_sub(offset).max(1),
            allocated: true,
        })
    }

    /// True if discarded blocks read as zeroes: those of a file are holes, and a block device may keep old data.
    #[must_use]
    pub fn discards_zero(&self) -> bool {
        !matches!(self.0.backend, ImageBackend::Device(..))
    }

    /// True if only one engine at a time can serve the disk: direct I/O cannot write single logical blocks, and only
    /// within one engine do requests that rewrite parts of a block wait for each other.
    #[must_use]
    pub fn needs_one_engine(&self) -> bool {
        self.0.geometry.align.offset > u64::from(self.0.geometry.logical_block)
    }

    /// This disk for as many engines at a time: without direct I/O if it [needs one engine](Disk::needs_one_engine)
    /// with it.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn for_engines(self, engines: u16) -> io::Result<Self> {
        if engines <= 1 || !self.needs_one_engine() {
            return Ok(self);
        }
        let without_direct_io = |file: &File| {
            geometry::end_direct_io(file)?;
            file.try_clone()
        };
        let backend = match &self.0.backend {
            ImageBackend::File(file) => ImageBackend::File(without_direct_io(file)?),
            ImageBackend::Device(file, discards) => {
                ImageBackend::Device(without_direct_io(file)?, Arc::clone(discards))
            }
            ImageBackend::Qcow2(_) => return Ok(self),
        };
        let align = Align::NONE;
        let geometry = Geometry {
            align,
            ..self.geometry()
        };
        Ok(Self::new(backend, geometry, self.0.policy))
    }

    pub(crate) fn backend(&self) -> &ImageBackend {
        &self.0.backend
    }

    pub(crate) fn align(&self) -> Align {
        self.0.geometry.align
    }

    /// Records the error of a flush after which the state of earlier writes is unknown.
    pub(crate) fn set_flush_error(&self, errno: i32) {
        self.0.flush_error.store(errno, Ordering::Relaxed);
    }

    /// True if a flush failed, and writes that had completed before it may not be on stable storage. Every later flush
    /// fails.
    #[must_use]
    pub fn lost_writes(&self) -> bool {
        self.flush_error() != 0
    }

    /// The syncs of all engines.
    pub(crate) fn syncs(&self) -> &Syncs {
        &self.0.syncs
    }

    /// The error number that [`Disk::set_flush_error`] recorded, else 0.
    pub(crate) fn flush_error(&self) -> i32 {
        self.0.flush_error.load(Ordering::Relaxed)
    }
}

/// Offset that a seek returns, `None` if there is no data or hole of that kind up to the end.
fn seek(file: &File, offset: u64, whence: i32) -> io::Result<Option<u64>> {
    let from = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: lseek takes no pointer. Nothing else uses the descriptor's position.
    let at = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
    if let Ok(at) = u64::try_from(at) {
        return Ok(Some(at));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENXIO) => Ok(None),
        // Block devices do not have these seeks. All counts as data.
        Some(libc::EINVAL | libc::EOPNOTSUPP) => Ok((whence == libc::SEEK_DATA).then_some(offset)),
        _ => Err(error),
    }
}

/// A disk's attachment to an engine.
#[derive(Debug)]
pub(crate) struct Attachment {
    disk: Disk,
    totals: Arc<EngineTotals>,
}

impl Attachment {
    pub fn new(disk: &Disk) -> io::Result<Self> {
        let before = disk.0.engines.fetch_add(1, Ordering::Relaxed);
        let attachment = Self {
            disk: disk.clone(),
            totals: disk.0.totals.join(),
        };
        if before > 0 && disk.needs_one_engine() {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        Ok(attachment)
    }

    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    pub fn totals(&self) -> &EngineTotals {
        &self.totals
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.disk.0.totals.leave(&self.totals);
        self.disk.0.engines.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(any(test, feature = "testing"))]
impl Disk {
    /// A disk with this geometry and no image.
    pub(crate) fn without_image(geometry: Geometry, policy: ErrorPolicy) -> Self {
        Self::new(
            ImageBackend::File(File::open("/dev/null").unwrap()),
            geometry,
            policy,
        )
    }

    /// A device with this geometry whose descriptor is that of `file`.
    #[cfg(test)]
    pub(crate) fn of_device(file: File, geometry: Geometry) -> Self {
        let discards = Arc::new(DiscardThread::new(512).unwrap());
        Self::new(
            ImageBackend::Device(file, discards),
            geometry,
            ErrorPolicy::Report,
        )
    }

    #[cfg(test)]
    pub(crate) fn set_size(&self, size: u64) {
        self.0.size.store(size, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_seeks_to_data_is_allocated_up_to_the_end() {
        // Like block devices, procfs refuses these seeks.
        let file = File::open("/proc/version").unwrap();
        let image = tempfile::tempfile_in("/var/tmp").unwrap();
        image.set_len(4096).unwrap();
        let geometry = Disk::open_raw(image.into(), DiskOptions::default())
            .unwrap()
            .geometry();
        let disk = Disk::new(ImageBackend::File(file), geometry, ErrorPolicy::Report);
        let extent = disk.extent(512).unwrap();
        let (offset, len, allocated) = (512, 4096 - 512, true);
        assert_eq!(
            extent,
            Extent {
                offset,
                len,
                allocated
            }
        );
    }
}
