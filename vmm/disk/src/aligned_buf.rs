//! Buffers for direct I/O, which the kernel wants aligned.

use std::alloc::{Layout, alloc, dealloc};
use std::io;
use std::ptr::NonNull;

/// A block of memory aligned for direct I/O.
#[derive(Debug)]
pub(crate) struct AlignedBuf {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the buffer owns the memory, and only its owner reaches it.
unsafe impl Send for AlignedBuf {}

impl AlignedBuf {
    /// `len` bytes (not 0) aligned to `align` (a power of two).
    pub fn new(len: usize, align: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(len.max(1), align).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc(layout) }).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: `start` was allocated with this size. This initialises every byte.
        unsafe { start.write_bytes(0, layout.size()) };
        Ok(Self { start, layout })
    }

    pub fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated and initialised in `new`, owned, borrowed as long as the slice lives.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
