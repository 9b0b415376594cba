//! What an engine is asked, and what it answers.

use std::io;

/// A piece of memory that I/O goes to or comes from.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct IoBuffer(pub(crate) libc::iovec);

// SAFETY: a pointer and a length carry no thread's property; who may use them when is the contract of
// `Engine::submit`.
unsafe impl Send for IoBuffer {}

impl IoBuffer {
    /// `len` bytes at `start`. Only [`Engine::submit`](crate::Engine::submit) makes use of the pointer, under its conditions.
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
pub enum IoRequest<'a> {
    /// Fill the buffers from `offset`.
    Read {
        /// Where on the disk.
        offset: u64,
        /// Where to.
        buffers: &'a [IoBuffer],
    },
    /// Write the buffers at `offset`.
    Write {
        /// Where on the disk.
        offset: u64,
        /// What.
        buffers: &'a [IoBuffer],
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
pub struct IoCompletion {
    /// As given to [`Engine::submit`](crate::Engine::submit).
    pub tag: u16,
    /// Done wholly, or the error of the part that failed.
    pub result: io::Result<()>,
}
