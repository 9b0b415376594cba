//! Requests to an engine and their completions.

use std::io;

/// A piece of memory to transfer to or from.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct IoBuffer(pub(crate) libc::iovec);

// SAFETY: a pointer and a length belong to no thread; `Engine::submit` has the contract for their use.
unsafe impl Send for IoBuffer {}

impl IoBuffer {
    /// `len` bytes at `start`. Only [`Engine::submit`](crate::Engine::submit) uses the pointer, under its conditions.
    #[must_use]
    pub fn new(start: *mut u8, len: usize) -> Self {
        Self(libc::iovec {
            iov_base: start.cast(),
            iov_len: len,
        })
    }

    /// Address of the first byte.
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

/// A request to a disk. Offsets and lengths are in bytes.
///
/// `durable` requests that the change is on stable storage before the request completes (FUA of SCSI, or a
/// write-through cache). A disk in write-through mode does so in any case.
#[derive(Clone, Copy, Debug)]
pub enum IoRequest<'a> {
    /// Fill the buffers from `offset`.
    Read {
        /// First byte on the disk.
        offset: u64,
        /// Destination.
        buffers: &'a [IoBuffer],
    },
    /// Write the buffers at `offset`.
    Write {
        /// First byte on the disk.
        offset: u64,
        /// Source.
        buffers: &'a [IoBuffer],
        /// The data is on stable storage before completion.
        durable: bool,
    },
    /// Make every write that completed before this request stable.
    Flush,
    /// The content of the range is no longer needed.
    Discard {
        /// First byte on the disk.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// The change is on stable storage before completion.
        durable: bool,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// First byte on the disk.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// The range's storage may be freed.
        unmap: bool,
        /// The change is on stable storage before completion.
        durable: bool,
    },
}

/// The completion of a request.
#[derive(Debug)]
pub struct IoCompletion {
    /// Tag from [`Engine::submit`](crate::Engine::submit).
    pub tag: u16,
    /// Success of the whole request, or the error of the part that failed.
    pub result: io::Result<()>,
}
