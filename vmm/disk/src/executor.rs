//! What the two engines have in common: they carry out single system calls and tell when one is done.

use std::fmt::Debug;
use std::io;

use vmm_sys_util::eventfd::EventFd;

/// One system call on the image.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    Read {
        offset: u64,
        vector: Vector,
    },
    Write {
        offset: u64,
        vector: Vector,
        durable: bool,
    },
    /// fdatasync
    Sync,
    /// fallocate
    Allocate {
        mode: i32,
        offset: u64,
        len: u64,
    },
}

/// At least one and at most 1024 iovecs that outlive the call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vector {
    pub start: *const libc::iovec,
    pub count: u32,
}

// SAFETY: a pointer and a count carry no thread's property; validity is the contract of `Executor::push`.
unsafe impl Send for Vector {}

/// Carries out calls. At most as many are out at once as the executor was made for.
pub(crate) trait Executor: Debug + Send {
    /// Takes a call under a tag that no other call has.
    ///
    /// # Safety
    /// Until `pop` returned the tag, the call's iovecs and the memory they name stay valid.
    unsafe fn push(&mut self, tag: u16, call: Call);

    /// Starts the calls taken. Costs nothing if there are none.
    fn submit(&mut self) -> io::Result<()>;

    /// A call that is done, and what the kernel returned (negative: an error number).
    fn pop(&mut self) -> Option<(u16, i32)>;

    /// Calls started and not yet popped.
    fn running(&self) -> usize;

    /// Readable when `pop` may have something.
    fn event(&self) -> &EventFd;
}
