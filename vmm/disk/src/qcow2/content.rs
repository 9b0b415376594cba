//! An open qcow2 image, as its threads use it.

use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use imago::Mapping;
use imago::io_buffers::{IoVector, IoVectorMut};

use super::file_storage;
use super::open::{CLUSTER, ImagoAccess, create, guarded, open_base, open_file, open_image};
use crate::io_backend::{IoCall, IovecList};
use crate::{DiskOptions, Extent, Geometry, ImageFormat};

/// Maximum bytes of one call, to bound its time. The engine submits the rest in another call.
const MAX_CALL_BYTES: usize = 16 << 20;

/// The image, its base, and the lock around them.
#[derive(Debug)]
pub(crate) struct ImageContent {
    /// `None` only while it is dropped.
    ///
    /// Reads, writes and flushes share the lock; imago synchronises them: a write that allocates holds its L2 table's
    /// lock from the lookup of the mapping to its change, over the copy and the write of the data. Zeroing and
    /// discarding take it exclusively: imago checks if the rest of a cluster is zero before it zeroes the whole
    /// cluster, and frees clusters that another thread may be reading or writing.
    access: RwLock<Option<ImagoAccess>>,
    /// The image's own file.
    file: Arc<File>,
    geometry: Geometry,
    cluster: u64,
    /// imago panicked, so its state in memory may be inconsistent.
    broken: AtomicBool,
    /// An fdatasync of the image's file failed.
    sync_failed: AtomicBool,
}

impl ImageContent {
    pub fn open(file: File, base: Option<(File, ImageFormat)>, options: DiskOptions) -> io::Result<Self> {
        let file = open_file(file, options)?;
        let base = base.map(|(base, format)| {
            let opened = open_base(&file, base, format, options);
            opened.map_err(of("its base"))
        });
        Self::of_image(file, base.transpose()?, options)
    }

    /// Formats the empty `file` and opens it.
    pub fn overlay(file: File, base: File, format: ImageFormat, options: DiskOptions) -> io::Result<Self> {
        let file = open_file(file, options).map_err(of("its overlay"))?;
        let base = open_base(&file, base, format, options)?;
        create(&file, base.size(), CLUSTER)
            .and_then(|()| Self::of_image(file, Some(base), options))
            .map_err(of("its overlay"))
    }

    fn of_image(file: Arc<File>, base: Option<ImagoAccess>, options: DiskOptions) -> io::Result<Self> {
        let (access, header) = open_image(&file, base, !options.read_only)?;
        Ok(Self {
            access: RwLock::new(Some(access)),
            geometry: Geometry::of_image(&file, header.size, header.cluster, options)?,
            file,
            cluster: header.cluster,
            broken: AtomicBool::new(false),
            sync_failed: AtomicBool::new(false),
        })
    }

    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn run<T>(&self, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        file_storage::forget_errno();
        if self.broken.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
            self.broken.store(true, Ordering::Relaxed);
            tracing::error!(
                file = ?self.file,
                "imago panicked: every request to this image fails from now on"
            );
            Err(io::Error::from_raw_os_error(libc::EIO))
        })
    }

    /// Runs with the lock shared.
    fn shared<T>(&self, run: impl FnOnce(&ImagoAccess) -> io::Result<T>) -> io::Result<T> {
        self.run(|| {
            let access = self.access.read().unwrap_or_else(PoisonError::into_inner);
            run(access.as_ref().ok_or(io::ErrorKind::NotFound)?)
        })
    }

    /// Runs with the lock held exclusively.
    fn with_write_lock<T>(&self, run: impl FnOnce(&mut ImagoAccess) -> io::Result<T>) -> io::Result<T> {
        self.run(|| {
            let mut access = self.access.write().unwrap_or_else(PoisonError::into_inner);
            run(access.as_mut().ok_or(io::ErrorKind::NotFound)?)
        })
    }

    /// Fills `buf` from byte `offset` of the disk. The range is on the disk.
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.shared(|access| access.read(buf, offset))
    }

    /// The extent at `offset`, which is on the disk.
    pub fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.shared(|access| {
            let (mapping, len) = access.get_mapping(offset, access.size() - offset)?;
            let allocated = !matches!(mapping, Mapping::Zero { .. } | Mapping::Eof { .. });
            let len = len.max(1);
            Ok(Extent {
                offset,
                len,
                allocated,
            })
        })
    }

    /// Executes a call and returns what the kernel would for a plain file: bytes moved, or a negative error number.
    ///
    /// # Safety
    /// The call's iovecs and the memory that they name are valid, for writes too if it reads.
    pub unsafe fn perform(&self, call: IoCall) -> i32 {
        let result = match call {
            // SAFETY: by this function's contract.
            IoCall::Read { offset, vector } => unsafe { self.read_vector(offset, vector) },
            // A durable write is followed by a sync: it goes through the page cache.
            // SAFETY: by this function's contract.
            IoCall::Write { offset, vector, .. } => unsafe { self.write_vector(offset, vector) },
            IoCall::Sync => self.sync().map(|()| 0),
            IoCall::Allocate {
                mode,
                offset,
                len,
                hint,
            } => {
                let punch = mode & libc::FALLOC_FL_PUNCH_HOLE != 0;
                // imago subtracts a whole cluster from the end of the disk if it may not zero the last one.
                if !hint && self.geometry.size < self.cluster {
                    return -libc::EOPNOTSUPP;
                }
                self.with_write_lock(|access| match (punch, hint) {
                    (false, _) => access.write_zeroes(offset, len),
                    (true, hint) => self.discard(access, offset, len, hint),
                })
                .map(|()| 0)
            }
        };
        result.map_or_else(
            |error| {
                let errno = file_storage::errno(&error);
                tracing::debug!(%error, errno, ?call, "qcow2 request failed");
                -errno
            },
            |len| len as i32,
        )
    }

    /// # Safety
    /// The iovecs and the memory they name are valid for writes.
    unsafe fn read_vector(&self, offset: u64, vector: IovecList) -> io::Result<usize> {
        // SAFETY: by this function's contract.
        let buffers = unsafe { pieces(vector) };
        let slice = |(start, len): (*mut u8, usize)| {
            // The guest may change this memory in the meantime. Nothing depends on its content: imago hands the slices
            // to the kernel through our storage, fills or copies over them as a whole, or inflates into them, where
            // their length bounds what it copies back from them, not their content.
            // SAFETY: the memory is valid for writes as long as the call, see above for other writers. No two slices
            // that share a byte exist at the same time, see below.
            unsafe { std::slice::from_raw_parts_mut(start, len) }
        };
        self.shared(|access| {
            if overlap(&buffers) {
                // Some guests read data that they do not want into one page over and over.
                let mut at = offset;
                for buffer in &buffers {
                    access.readv(IoVectorMut::new().with_pushed(slice(*buffer)), at)?;
                    at += buffer.1 as u64;
                }
                return Ok(());
            }
            let mut into = IoVectorMut::with_capacity(buffers.len());
            buffers.iter().for_each(|buffer| into.push(slice(*buffer)));
            access.readv(into, offset)
        })?;
        Ok(buffers.iter().map(|(_, len)| len).sum())
    }

    /// # Safety
    /// The iovecs and the memory they name are valid for reads.
    unsafe fn write_vector(&self, offset: u64, vector: IovecList) -> io::Result<usize> {
        // SAFETY: by this function's contract.
        let buffers = unsafe { pieces(vector) };
        let mut from = IoVector::with_capacity(buffers.len());
        for (start, len) in &buffers {
            // SAFETY: the memory is valid for reads as long as the call. The guest may change it in the meantime. It
            // does not matter then which bytes are written: imago does not look at them, it hands the slices to the
            // kernel through our storage.
            from.push(unsafe { std::slice::from_raw_parts(*start, *len) });
        }
        self.shared(|access| access.writev(from, offset))?;
        Ok(buffers.iter().map(|(_, len)| len).sum())
    }

    /// Writes the tables to the file.
    pub fn write_back(&self) -> io::Result<()> {
        match self.geometry.read_only {
            true => Ok(()),
            false => self.shared(|access| access.flush()),
        }
    }

    /// Writes the tables to the file, then flushes the file.
    fn sync(&self) -> io::Result<()> {
        self.write_back()?;
        match self.geometry.read_only {
            true => Ok(()),
            false => self.shared(|access| access.sync()).inspect_err(|_| {
                self.sync_failed.store(true, Ordering::Relaxed);
            }),
        }
    }

    /// True if an fdatasync failed. A failed write of the tables is no loss: they are still in memory.
    pub fn sync_failed(&self) -> bool {
        self.sync_failed.load(Ordering::Relaxed)
    }

    /// Frees the storage of a range, which then reads as zeroes. With `hint`, parts of clusters may stay.
    fn discard(&self, access: &mut ImagoAccess, mut offset: u64, len: u64, hint: bool) -> io::Result<()> {
        let end = offset + len;
        while offset < end {
            let (mapping, len) = access.get_mapping(offset, end - offset)?;
            let mut stop = offset + len.max(1);
            let cluster = stop & !(self.cluster - 1);
            // The base ends within a cluster, or has smaller clusters.
            let mixed = stop < end && cluster <= offset;
            if mixed {
                stop = (cluster + self.cluster).min(end);
            } else if stop < end {
                stop = cluster;
            }
            let len = stop - offset;
            let host = match mapping {
                _ if mixed => Some(None),
                Mapping::Zero { .. } => None,
                // A cluster of this image that nothing else uses.
                Mapping::Raw {
                    offset: host,
                    writable: true,
                    ..
                } => Some(Some(host)),
                _ => Some(None),
            };
            if let Some(host) = host {
                if hint {
                    access.discard_to_any(offset, len)?;
                } else {
                    access.discard_to_zero(offset, len)?;
                }
                if let Some(host) = host {
                    self.punch(offset, host, len);
                }
            }
            offset = stop;
        }
        Ok(())
    }

    /// Punches holes for the whole clusters of a range of the disk whose data was at `host` until it was discarded.
    /// imago only marks them as free.
    fn punch(&self, offset: u64, host: u64, len: u64) {
        let start = offset.next_multiple_of(self.cluster);
        let end = (offset + len) & !(self.cluster - 1);
        if start < end {
            // A failure costs only the storage.
            let _ = file_storage::punch(&self.file, host + (start - offset), end - start);
        }
    }
}

impl Drop for ImageContent {
    fn drop(&mut self) {
        let access = self.access.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Writes the cached tables back.
        let _ = guarded(|| {
            drop(access.take());
            Ok(())
        });
    }
}

/// Prefixes an error with the name of the image that it is about.
fn of(whose: &str) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{whose}: {error}"))
}

/// Addresses and lengths of the first [`MAX_CALL_BYTES`] bytes.
///
/// # Safety
/// The iovecs are valid.
unsafe fn pieces(vector: IovecList) -> Vec<(*mut u8, usize)> {
    // SAFETY: by this function's contract.
    let iovecs = unsafe { std::slice::from_raw_parts(vector.start, vector.count as usize) };
    let mut room = MAX_CALL_BYTES;
    let mut pieces = Vec::with_capacity(iovecs.len());
    for iovec in iovecs {
        let len = iovec.iov_len.min(room);
        // An empty iovec may have any address.
        if len > 0 {
            pieces.push((iovec.iov_base.cast(), len));
        }
        room -= len;
    }
    pieces
}

/// True if two of the buffers share memory.
fn overlap(buffers: &[(*mut u8, usize)]) -> bool {
    let end = |(start, len): &(*mut u8, usize)| *start as usize + len;
    let ascend =
        |buffers: &[(*mut u8, usize)]| buffers.windows(2).all(|pair| end(&pair[0]) <= pair[1].0 as usize);
    if ascend(buffers) {
        return false;
    }
    let mut sorted = buffers.to_vec();
    sorted.sort_unstable();
    !ascend(&sorted)
}
