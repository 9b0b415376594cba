//! A file as imago's storage: whole transfers, zeroes behind the end, no paths.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::drivers::CommonStorageHelper;

use crate::completion_queue::lock;
use crate::geometry;

/// Maximum iovecs of one call (UIO_MAXIOV).
const VECTOR: usize = 1024;

/// Bytes of an entry of an L1 or refcount table. imago writes nothing else of this length.
const ENTRY: usize = 8;

thread_local! {
    /// First error number of the kernel since [`forget_errno`]. imago does not pass all of them on.
    static ERRNO: Cell<i32> = const { Cell::new(0) };
}

/// Clears the recorded error number of this thread, at the start of a request.
pub(super) fn forget_errno() {
    ERRNO.set(0);
}

/// The error number of a failed request, even if imago wrapped the error.
pub(super) fn errno(error: &io::Error) -> i32 {
    match (error.raw_os_error(), ERRNO.get(), error.kind()) {
        (Some(errno), ..) => errno,
        (None, 0, io::ErrorKind::Unsupported) => libc::EOPNOTSUPP,
        (None, 0, io::ErrorKind::OutOfMemory) => libc::ENOMEM,
        (None, 0, _) => libc::EIO,
        (None, errno, _) => errno,
    }
}

/// An open file.
#[derive(Debug)]
pub(super) struct FileStorage {
    file: Arc<File>,
    /// Nothing was ever written at or behind this offset.
    end: AtomicU64,
    unwritten: UnwrittenEntries,
    helper: CommonStorageHelper,
}

impl fmt::Display for FileStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "descriptor {}", self.file.as_raw_fd())
    }
}

/// Result of a system call, `None` if it was interrupted.
fn check(result: isize) -> io::Result<Option<usize>> {
    if let Ok(moved) = usize::try_from(result) {
        return Ok(Some(moved));
    }
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::Interrupted {
        return Ok(None);
    }
    if ERRNO.get() == 0 {
        ERRNO.set(error.raw_os_error().unwrap_or(libc::EIO));
    }
    Err(error)
}

fn signed(offset: u64) -> io::Result<i64> {
    i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

/// Advances the iovecs past `moved` bytes.
fn advance(vector: &mut [libc::iovec], mut moved: usize) -> &mut [libc::iovec] {
    let mut done = 0;
    while done < vector.len() && vector[done].iov_len <= moved {
        moved -= vector[done].iov_len;
        done += 1;
    }
    let rest = &mut vector[done..];
    if let [first, ..] = rest {
        // SAFETY: still within the buffer.
        first.iov_base = unsafe { first.iov_base.byte_add(moved) };
        first.iov_len -= moved;
    }
    rest
}

/// Punches a hole into `file`, which then reads as zeroes.
pub(super) fn punch(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (offset, len) = (signed(offset)?, signed(len)?);
    loop {
        // SAFETY: takes no pointer.
        let result = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) };
        if check(result as isize)?.is_some() {
            return Ok(());
        }
    }
}

/// Entries of tables whose writes failed. imago has changed them in memory and does not write them again, so that the
/// clusters they lead to would be lost with the image in memory.
#[derive(Debug, Default)]
struct UnwrittenEntries {
    /// By their offset.
    entries: Mutex<BTreeMap<u64, [u8; ENTRY]>>,
    any: AtomicBool,
}

impl UnwrittenEntries {
    fn add(&self, offset: u64, entry: [u8; ENTRY]) {
        lock(&self.entries).insert(offset, entry);
        self.any.store(true, Ordering::SeqCst);
    }

    /// Forgets those in a range that is about to be written: as a newer entry, or for another use.
    fn forget(&self, offset: u64, len: u64) {
        if self.any.load(Ordering::SeqCst) {
            let first = offset.saturating_sub(ENTRY as u64 - 1);
            lock(&self.entries).retain(|at, _| !(first..offset.saturating_add(len)).contains(at));
        }
    }

    /// Calls `write` for each, and forgets it. Nothing else writes there meanwhile.
    fn write(&self, write: impl Fn(&[u8], u64) -> io::Result<()>) -> io::Result<()> {
        if self.any.load(Ordering::SeqCst) {
            let mut entries = lock(&self.entries);
            while let Some((offset, entry)) = entries.pop_first() {
                write(&entry, offset).inspect_err(|_| {
                    entries.insert(offset, entry);
                })?;
            }
            self.any.store(false, Ordering::SeqCst);
        }
        Ok(())
    }
}

impl FileStorage {
    pub fn new(file: &Arc<File>) -> io::Result<Self> {
        Ok(Self {
            end: AtomicU64::new(geometry::volume_size(file)?),
            file: Arc::clone(file),
            unwritten: UnwrittenEntries::default(),
            helper: CommonStorageHelper::default(),
        })
    }
}

impl FileStorage {
    fn write(&self, bufv: &IoVector<'_>, offset: u64) -> io::Result<()> {
        let mut at = signed(offset)?;
        // Before the write, see `pure_write_zeroes`.
        self.end
            .fetch_max(offset.saturating_add(bufv.len()), Ordering::SeqCst);
        // SAFETY: used while `bufv` lives.
        let mut vector = unsafe { bufv.as_iovec() }.to_vec();
        let mut rest = &mut vector[..];
        while !rest.is_empty() {
            let count = rest.len().min(VECTOR) as i32;
            // SAFETY: the iovecs are those of `bufv`, or what is left of them.
            let result = unsafe { libc::pwritev(self.file.as_raw_fd(), rest.as_ptr(), count, at) };
            match check(result)? {
                Some(0) if rest.iter().any(|buffer| buffer.iov_len > 0) => {
                    return Err(io::ErrorKind::WriteZero.into());
                }
                Some(moved) => {
                    at += moved as i64;
                    rest = advance(rest, moved);
                }
                None => {}
            }
        }
        Ok(())
    }
}

impl Storage for FileStorage {
    fn size(&self) -> io::Result<u64> {
        geometry::volume_size(&self.file)
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        // SAFETY: used while `bufv` lives.
        let mut vector = unsafe { bufv.as_iovec() }.to_vec();
        let mut at = signed(offset)?;
        let mut rest = &mut vector[..];
        while !rest.is_empty() {
            let count = rest.len().min(VECTOR) as i32;
            // SAFETY: the iovecs are those of `bufv`, or what is left of them, which is ours to write to.
            let result = unsafe { libc::preadv(self.file.as_raw_fd(), rest.as_ptr(), count, at) };
            match check(result)? {
                Some(0) => break,
                Some(moved) => {
                    at += moved as i64;
                    rest = advance(rest, moved);
                }
                None => {}
            }
        }
        let left: u64 = rest.iter().map(|buffer| buffer.iov_len as u64).sum();
        if left > 0 {
            // The file ends here.
            let read = bufv.len() - left;
            bufv.split_tail_at(read).fill(0);
        }
        Ok(())
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        self.unwritten.forget(offset, bufv.len());
        self.write(&bufv, offset).inspect_err(|_| {
            let mut entry = [0; ENTRY];
            if bufv.len() == ENTRY as u64 {
                bufv.copy_into_slice(&mut entry);
                self.unwritten.add(offset, entry);
            }
        })
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.unwritten.forget(offset, length);
        let (stop, end) = (offset.saturating_add(length), self.end.load(Ordering::SeqCst));
        // Behind `end` nothing was ever written: it is a hole, or behind the end of the file.
        if offset < end {
            punch(&self.file, offset, length).map_err(|error| match error.raw_os_error() {
                // imago writes zeroes instead.
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => io::ErrorKind::Unsupported.into(),
                _ => error,
            })?;
        }
        if stop > end && length > 0 {
            // The file reaches to the end of every cluster that the tables name, so that one that is cut off shows.
            // A write cannot shorten the file, as ftruncate could while another thread extends it.
            let last = IoVector::new().with_pushed(&[0]);
            // SAFETY: as for this function; the byte is in the range.
            unsafe { self.pure_writev(last, stop - 1) }?;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.unwritten
            .write(|entry, offset| self.write(&IoVector::new().with_pushed(entry), offset))
    }

    fn sync(&self) -> io::Result<()> {
        loop {
            // SAFETY: takes no pointer.
            let result = unsafe { libc::fdatasync(self.file.as_raw_fd()) };
            if check(result as isize)?.is_some() {
                return Ok(());
            }
        }
    }

    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        &self.helper
    }
}
