//! The contract between a storage device and a disk: one stream of tagged requests.

use std::fmt::Debug;
use std::io;
use std::os::fd::AsRawFd;

use vmm_sys_util::eventfd::EventFd;

/// A piece of memory that I/O goes to or comes from.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Buffer(pub(crate) libc::iovec);

// SAFETY: a pointer and a length carry no thread's property; who may use them when is the contract of
// `DiskQueue::submit`.
unsafe impl Send for Buffer {}

impl Buffer {
    /// `len` bytes at `start`. Only [`DiskQueue::submit`] makes use of the pointer, under its conditions.
    #[must_use]
    pub fn new(start: *mut u8, len: usize) -> Self {
        Self(libc::iovec {
            iov_base: start.cast(),
            iov_len: len,
        })
    }

    /// Address.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Length in bytes.
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.0.iov_len
    }
}

/// What a disk can be asked. Offsets and lengths are bytes.
///
/// `durable` asks that the change is on stable storage before the request completes (SCSI's FUA, or a
/// write-through cache); a disk opened write-through does so in any case.
#[derive(Clone, Copy, Debug)]
pub enum Request<'a> {
    /// Fill the buffers from `offset`.
    Read {
        /// Where on the disk.
        offset: u64,
        /// Where to.
        buffers: &'a [Buffer],
    },
    /// Write the buffers at `offset`.
    Write {
        /// Where on the disk.
        offset: u64,
        /// What.
        buffers: &'a [Buffer],
        /// On stable storage before completion.
        durable: bool,
    },
    /// Make every write completed before this request stable.
    Flush,
    /// The content of the range does not matter any more.
    Discard {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// On stable storage before completion.
        durable: bool,
    },
    /// The range reads as zeroes from now on.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The range's storage may be given back.
        unmap: bool,
        /// On stable storage before completion.
        durable: bool,
    },
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// As given to [`DiskQueue::submit`].
    pub tag: u16,
    /// Done wholly, or the error of the part that failed.
    pub result: io::Result<()>,
}

/// A stream of requests to a disk, and of their completions in any order.
///
/// Owned by one worker at a time. Dropping it waits for what is in flight.
pub trait DiskQueue: Debug + Send {
    /// Requests that can be in flight; tags are below it.
    fn depth(&self) -> u16;

    /// Takes a request. It may stay with us until [`DiskQueue::kick`]. A request that does not fit the disk
    /// (beyond its end, read-only, not whole sectors) completes with `InvalidInput` or `PermissionDenied`.
    ///
    /// # Safety
    /// `tag` is below [`DiskQueue::depth`] and not in flight (checked; panics). Until the request's
    /// completion was returned or the queue was dropped, every buffer is valid memory, for reads or
    /// writes as the request needs. Others may access it meanwhile.
    unsafe fn submit(&mut self, tag: u16, request: Request<'_>);

    /// Sends what was submitted on its way. To be called after a round of [`DiskQueue::submit`] and
    /// [`DiskQueue::complete`]: a completion can free what another request waits for.
    ///
    /// # Errors
    /// The queue is broken: nothing more will complete but what the kernel already has.
    fn kick(&mut self) -> io::Result<()>;

    /// The next completed request, if there is one.
    fn complete(&mut self) -> Option<Completion>;

    /// Readable when [`DiskQueue::complete`] may have something new. The reader resets it, then completes. What
    /// ended already when it was submitted or kicked may not show here.
    fn event(&self) -> &EventFd;

    /// Waits for [`DiskQueue::event`] and resets it. May return early.
    fn wait(&self) {
        wait_and_reset(self.event());
    }
}

/// Waits until `event` is signalled, and takes the signal. Returns early if interrupted.
pub(crate) fn wait_and_reset(event: &EventFd) {
    let mut poll = libc::pollfd {
        fd: event.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one pollfd is passed and announced.
    unsafe { libc::poll(&raw mut poll, 1, -1) };
    let _ = event.read();
}
