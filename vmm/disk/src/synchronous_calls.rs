//! Reads, writes and syncs that the calling thread executes itself, without the ring.
//!
//! io_uring tries a call with `RWF_NOWAIT`, and wakes a thread of the kernel if the file system does not support that.
//! Some file systems never do, although such calls rarely wait:
//!
//! - tmpfs and ramfs, which have no device and nothing to sync;
//! - ext4 for writes to the page cache. These can wait, for writeback or for the journal. While they take long, the
//!   ring has them, and always if the engine serves several disks: the others would wait, too.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use crate::blocking_call::perform;
use crate::geometry::file_system;
use crate::io_backend::IoCall;

/// `f_type` of ramfs.
const RAMFS_MAGIC: libc::c_long = 0x8584_58f6;

/// Time per write, averaged, above which writes wait for something.
const SLOW: Duration = Duration::from_millis(1);

/// A write's share in the average.
const SHARE: u32 = 8;

/// The ring has the writes for this many times the average, so the thread waits for a hundredth of the time.
const RING_TIME: u32 = 100;

/// Calls of a file that need no ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Synchronous {
    None,
    Writes(RawFd),
    AllButAllocate(RawFd),
}

/// The attached files, and the time that writes take.
#[derive(Debug, Default)]
pub(crate) struct SynchronousCalls {
    /// Indexed by slot.
    files: Vec<Synchronous>,
    /// Disks of the engine.
    disks: usize,
    /// Moving average.
    write_time: Duration,
    /// Until then the ring has the writes to ext4.
    ring_until: Option<Instant>,
}

impl SynchronousCalls {
    /// Attaches `file`, which stays open until [`SynchronousCalls::detach`].
    pub fn attach(&mut self, slot: u32, file: BorrowedFd<'_>) {
        self.set(slot, synchronous(file));
    }

    pub fn detach(&mut self, slot: u32) {
        self.set(slot, Synchronous::None);
    }

    /// See [`IoBackend::set_disks`](crate::io_backend::IoBackend::set_disks).
    pub fn set_disks(&mut self, disks: usize) {
        self.disks = disks;
    }

    fn set(&mut self, slot: u32, calls: Synchronous) {
        let index = slot as usize;
        if self.files.len() <= index {
            self.files.resize(index + 1, Synchronous::None);
        }
        self.files[index] = calls;
    }

    /// Executes the call if it needs no ring. Returns the kernel's result, negative for an error number.
    ///
    /// # Safety
    /// The call's iovecs and the memory that they name are valid.
    pub unsafe fn execute(&mut self, slot: u32, call: IoCall) -> Option<i32> {
        let file = *self.files.get(slot as usize)?;
        match (file, call) {
            // The kernel does nothing for it either, and the thread may not call fdatasync.
            (Synchronous::AllButAllocate(_), IoCall::Sync) => Some(0),
            (Synchronous::AllButAllocate(fd), IoCall::Read { .. } | IoCall::Write { .. }) => {
                // SAFETY: the file stays attached, and the caller guarantees the call's memory.
                Some(unsafe { perform(fd, call) })
            }
            (Synchronous::Writes(fd), IoCall::Write { durable: false, .. }) if self.disks == 1 => {
                let start = Instant::now();
                if self.ring_until.is_some_and(|end| start < end) {
                    return None;
                }
                // SAFETY: as above.
                let result = unsafe { perform(fd, call) };
                self.took(start.elapsed(), start);
                Some(result)
            }
            _ => None,
        }
    }

    /// Counts a write that took `time`, and leaves the next ones to the ring if writes are slow.
    fn took(&mut self, time: Duration, start: Instant) {
        self.write_time = self.write_time * (SHARE - 1) / SHARE + time / SHARE;
        if self.write_time > SLOW {
            self.ring_until = Some(start + time + self.write_time * RING_TIME);
            self.write_time = Duration::ZERO;
        }
    }
}

fn synchronous(file: BorrowedFd<'_>) -> Synchronous {
    match file_system(file) {
        Some(libc::TMPFS_MAGIC | RAMFS_MAGIC) => Synchronous::AllButAllocate(file.as_raw_fd()),
        // Also ext2's and ext3's.
        Some(libc::EXT4_SUPER_MAGIC) if uses_page_cache(file) => Synchronous::Writes(file.as_raw_fd()),
        _ => Synchronous::None,
    }
}

fn uses_page_cache(file: BorrowedFd<'_>) -> bool {
    // SAFETY: fcntl(F_GETFL) takes no pointer.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    flags >= 0 && flags & libc::O_DIRECT == 0
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;
    use crate::io_backend::IovecList;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn devices_are_left_to_the_ring() {
        // As nodes of block devices, this one is on devtmpfs.
        let device = File::options().read(true).write(true).open("/dev/null").unwrap();
        assert_eq!(synchronous(device.as_fd()), Synchronous::None);
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        assert!(matches!(
            synchronous(file.as_fd()),
            Synchronous::AllButAllocate(_)
        ));
    }

    /// A buffer, and the calls that use it.
    struct Buffer(libc::iovec);

    impl Buffer {
        fn new(bytes: &mut [u8]) -> Self {
            Self(libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            })
        }

        fn vector(&self) -> IovecList {
            IovecList {
                start: &raw const self.0,
                count: 1,
            }
        }

        fn read(&self) -> IoCall {
            IoCall::Read {
                offset: 4,
                vector: self.vector(),
            }
        }

        fn write(&self, durable: bool) -> IoCall {
            IoCall::Write {
                offset: 4,
                vector: self.vector(),
                durable,
            }
        }
    }

    fn memory_file() -> File {
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"disk".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the descriptor is new and owned by nobody else.
        unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
    }

    fn execute(calls: &mut SynchronousCalls, slot: u32, call: IoCall) -> Option<i32> {
        // SAFETY: the callers keep the buffer of the call.
        unsafe { calls.execute(slot, call) }
    }

    /// As if `file` were on ext4.
    fn writes(file: &File) -> SynchronousCalls {
        let mut calls = SynchronousCalls::default();
        calls.set(0, Synchronous::Writes(file.as_raw_fd()));
        calls.set_disks(1);
        calls
    }

    #[test]
    fn the_ring_has_writes_that_other_disks_would_wait_for() {
        let file = memory_file();
        let mut calls = writes(&file);
        let mut bytes = [1; 8];
        let buffer = Buffer::new(&mut bytes);
        for (disks, result) in [(1, Some(8)), (2, None), (3, None), (1, Some(8))] {
            calls.set_disks(disks);
            assert_eq!(execute(&mut calls, 0, buffer.write(false)), result, "{disks}");
        }
        let mut calls = SynchronousCalls::default();
        calls.attach(0, file.as_fd());
        calls.set_disks(2);
        assert_eq!(execute(&mut calls, 0, buffer.write(false)), Some(8), "in memory");
    }

    #[test]
    fn files_in_memory_need_no_ring() {
        let (memory, other) = (memory_file(), File::open("/proc/version").unwrap());
        let mut calls = SynchronousCalls::default();
        calls.attach(0, other.as_fd());
        calls.attach(2, memory.as_fd());
        let (mut from, mut to) = (*b"content!", [0; 8]);
        let (source, target) = (Buffer::new(&mut from), Buffer::new(&mut to));
        assert_eq!(execute(&mut calls, 2, source.write(true)), Some(8));
        assert_eq!(execute(&mut calls, 2, target.read()), Some(8));
        assert_eq!(to, from);
        assert_eq!(execute(&mut calls, 2, IoCall::Sync), Some(0));
        let outside = Buffer(libc::iovec {
            iov_base: std::ptr::without_provenance_mut(8),
            iov_len: 8,
        });
        assert_eq!(
            execute(&mut calls, 2, outside.write(false)),
            Some(-libc::EFAULT),
            "the kernel's error"
        );
        for slot in [0, 1, 3] {
            assert_eq!(execute(&mut calls, slot, target.read()), None);
        }
        calls.detach(2);
        assert_eq!(execute(&mut calls, 2, target.read()), None);
    }

    #[test]
    fn only_writes_to_the_page_cache_of_ext4_need_no_ring() {
        let file = memory_file();
        let mut calls = writes(&file);
        let mut bytes = [1; 8];
        let buffer = Buffer::new(&mut bytes);
        assert_eq!(execute(&mut calls, 0, buffer.write(false)), Some(8));
        assert_eq!(execute(&mut calls, 0, buffer.write(true)), None, "durable");
        assert_eq!(execute(&mut calls, 0, buffer.read()), None);
        assert_eq!(execute(&mut calls, 0, IoCall::Sync), None);
        assert!(uses_page_cache(file.as_fd()));
        let file = tempfile::NamedTempFile::new().unwrap();
        let direct = File::options()
            .write(true)
            .custom_flags(libc::O_DIRECT)
            .open(file.path())
            .unwrap();
        assert!(!uses_page_cache(direct.as_fd()));
    }

    #[test]
    fn the_ring_has_writes_while_they_are_slow() {
        let file = memory_file();
        let mut bytes = [1; 8];
        let buffer = Buffer::new(&mut bytes);
        // The sequence of times that writes take, and whether the next one needs no ring.
        let fast = [MS / 100; 32];
        let cases: [(&[Duration], bool); 5] = [
            (&fast, true),
            // Another thread ran.
            (&[MS * 6], true),
            (&[MS * 10], false),
            (&[MS * 2; 5], true),
            (&[MS * 2; 6], false),
        ];
        for (times, synchronous) in cases {
            let mut calls = writes(&file);
            times.iter().for_each(|time| calls.took(*time, Instant::now()));
            let result = execute(&mut calls, 0, buffer.write(false));
            assert_eq!(result.is_some(), synchronous, "{times:?}");
        }
    }

    #[test]
    fn slow_writes_return_from_the_ring() {
        let file = memory_file();
        let mut bytes = [1; 8];
        let buffer = Buffer::new(&mut bytes);
        let mut calls = writes(&file);
        // An average of 25 ms.
        let start = Instant::now();
        calls.took(MS * 200, start);
        assert_eq!(calls.ring_until, Some(start + MS * 2700));
        assert_eq!(execute(&mut calls, 0, buffer.write(false)), None);
        calls.ring_until = Some(start);
        assert_eq!(execute(&mut calls, 0, buffer.write(false)), Some(8));
        calls.took(MS * 6, Instant::now());
        assert_eq!(
            execute(&mut calls, 0, buffer.write(false)),
            Some(8),
            "the average starts again"
        );
    }
}
