//! What the two engines have in common: they carry out single system calls and tell when one is done.

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;

/// One system call on the image.
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
    /// fallocate
    Allocate {
        mode: i32,
        offset: u64,
        len: u64,
        /// Nobody minds if nothing, or a part of it, is done.
        hint: bool,
    },
}

/// At least one and at most 1024 iovecs that outlive the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IovecList {
    pub start: *const libc::iovec,
    pub count: u32,
}

// SAFETY: a pointer and a count carry no thread's property; validity is the contract of `IoBackend::push`.
unsafe impl Send for IovecList {}

/// Carries out calls. At most as many are out at once as the executor was made for.
pub(crate) trait IoBackend: Debug + Send {
    /// How many files it can know at once.
    fn max_files(&self) -> u32;

    /// Makes `file` known under `slot`, which is below [`IoBackend::max_files`] and empty. It stays open until
    /// [`IoBackend::detach`].
    fn attach(&mut self, slot: u32, file: BorrowedFd<'_>) -> io::Result<()>;

    /// Forgets the file at `slot`, on which no call is out.
    fn detach(&mut self, slot: u32) -> io::Result<()>;

    /// Takes a call on the file at `slot` under a tag that no other call has.
    ///
    /// # Safety
    /// Until `pop` returned the tag, the file stays attached, and the call's iovecs and the memory they name
    /// stay valid.
    unsafe fn push(&mut self, tag: u16, slot: u32, call: IoCall);

    /// Starts the calls taken, and returns whether there were any. Costs nothing if there are none.
    fn submit(&mut self) -> io::Result<bool>;

    /// A call that is done, and what the kernel returned (negative: an error number).
    fn pop(&mut self) -> Option<(u16, i32)>;

    /// Calls started and not yet popped.
    fn running(&self) -> usize;

    /// Readable as long as `pop` has something, or nearly: it may be so without, for a moment.
    fn event(&self) -> BorrowedFd<'_>;
}
