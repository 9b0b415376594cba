//! A call that the calling thread executes.

use std::io;
use std::os::fd::RawFd;

use crate::io_backend::IoCall;

/// Executes a call. Returns the kernel's result, negative for an error number.
///
/// # Safety
/// The file is open; the call's iovecs and the memory that they name are valid.
pub(crate) unsafe fn perform(fd: RawFd, call: IoCall) -> i32 {
    let result = match call {
        // SAFETY: by this function's contract.
        IoCall::Read { offset, vector } => unsafe {
            libc::preadv2(fd, vector.start, vector.count as i32, offset as i64, 0)
        },
        IoCall::Write {
            offset,
            vector,
            durable,
        } => {
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            // SAFETY: by this function's contract.
            unsafe { libc::pwritev2(fd, vector.start, vector.count as i32, offset as i64, flags) }
        }
        // SAFETY: takes no pointer.
        IoCall::Sync => unsafe { libc::fdatasync(fd) as isize },
        IoCall::Allocate {
            mode, offset, len, ..
        } => {
            // SAFETY: takes no pointer.
            unsafe { libc::fallocate(fd, mode, offset as i64, len as i64) as isize }
        }
    };
    if result < 0 {
        -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
    } else {
        // The kernel moves at most 2 GiB less a page.
        result as i32
    }
}
