//! The interface of the two I/O backends, io_uring and threads: each executes single system calls.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;

/// One system call on an image's file.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IoCall {
    Read {
        offset: u64,
        vector: IovecList,
    },
    Write {
        offset: u64,
        vector: IovecList,
        durable: bool,
    },
    /// fdatasync
    Sync,
    /// fallocate; a hint on a block device is BLKDISCARD, which the device's own thread executes
    Allocate {
        mode: i32,
        offset: u64,
        len: u64,
        /// A discard: the call may fail or do only a part.
        hint: bool,
    },
}

/// From 1 to 1024 iovecs that outlive the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IovecList {
    pub start: *const libc::iovec,
    pub count: u32,
}

// SAFETY: a pointer and a count belong to no thread; `IoBackend::push` has the contract for their validity.
unsafe impl Send for IovecList {}

/// Executes calls. The creator sets how many can be in flight at once.
pub(crate) trait IoBackend: Debug + Send {
    /// Maximum number of attached files.
    fn max_files(&self) -> u32;

    /// Attaches `file` to `slot`, which is below [`IoBackend::max_files`] and empty. The file stays open until
    /// [`IoBackend::detach`].
    fn attach(&mut self, slot: u32, file: BorrowedFd<'_>) -> io::Result<()>;

    /// Detaches the file in `slot`, which has no call in flight.
    fn detach(&mut self, slot: u32) -> io::Result<()>;

    /// Tells how many disks the engine serves, those of other backends included.
    fn set_disks(&mut self, disks: usize);

    /// Takes a call on the file in `slot`, under a tag that no other call in flight has. May carry it out at once.
    ///
    /// # Safety
    /// Until `pop` returned the tag, the file stays attached, and the call's iovecs and the memory that they name stay
    /// valid.
    unsafe fn push(&mut self, tag: u16, slot: u32, call: IoCall);

    /// Starts the calls taken and not yet carried out. Returns true if there were any; makes no system call otherwise.
    fn submit(&mut self) -> io::Result<bool>;

    /// The tag and the return value (negative: an error number) of a finished call.
    fn pop(&mut self) -> Option<(u16, i32)>;

    /// Calls started or carried out, and not popped yet.
    fn running(&self) -> usize;

    /// Readable while `pop` has a result, except of a call that was carried out when it was pushed. May be readable for
    /// a moment without one.
    fn event(&self) -> BorrowedFd<'_>;
}
