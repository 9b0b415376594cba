//! Pages of guest memory that is a private mapping of a file.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

/// Maximum number of replaced ranges. Each may split a mapping in three. The kernel limits the mappings of a process
/// (vm.max_map_count, 65,530), and a guest that gives up every other page must not use them up.
const MAX_REPLACED: u32 = 16_384;

/// Ranges replaced so far. The limit is the process's, and so is the number.
static REPLACED: AtomicU32 = AtomicU32::new(0);

/// Returns pages to the host, which then read as zeroes: anonymous memory takes their place, because MADV_DONTNEED
/// shows the file's pages again.
///
/// # Errors
/// Too many ranges were replaced, or the kernel refuses. The pages keep their content then.
///
/// # Safety
/// [address, address + len) is whole pages of one region of guest memory.
pub(super) unsafe fn discard(address: *mut u8, len: usize) -> io::Result<()> {
    let address = address.cast::<libc::c_void>();
    // MADV_FREE is refused for any memory but anonymous: it says which pages were replaced before.
    // SAFETY: the content is the guest's to give up, as it does.
    if unsafe { libc::madvise(address, len, libc::MADV_FREE) } == 0 {
        // SAFETY: as above.
        return match unsafe { libc::madvise(address, len, libc::MADV_DONTNEED) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
    }
    if REPLACED
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, count_one)
        .is_err()
    {
        return Err(io::Error::other("too many ranges of the file are replaced"));
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: MAP_FIXED replaces only this range of guest memory. Its addresses stay valid, and nothing in this process
    // takes it to keep its content.
    if unsafe { libc::mmap(address, len, protection, flags, -1, 0) } == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping just made.
    unsafe { libc::madvise(address, len, libc::MADV_DONTDUMP) };
    Ok(())
}

fn count_one(replaced: u32) -> Option<u32> {
    (replaced < MAX_REPLACED).then_some(replaced + 1)
}
