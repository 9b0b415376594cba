//! What the VMM's own program has in memory.

use std::ffi::{c_int, c_void};
use std::ptr;

use rustix::mm::{Advice, madvise};

/// Lets go of the pages of the program's text and constants, which are read from its file again where they are needed.
///
/// Most of what makes a machine and loads a kernel, a third of the program and more, is not needed again before the
/// next reboot; a kernel frees its init sections for the same reason.
pub fn drop_text_pages() {
    // SAFETY: the callback is only called during this call, with what `dl_iterate_phdr` promises, and uses no data.
    unsafe { libc::dl_iterate_phdr(Some(drop_object_text), ptr::null_mut()) };
}

/// Gives back memory that the allocator keeps and nobody uses: a thousand disks leave a mebibyte of it.
pub fn trim_heap() {
    // SAFETY: may be called at any time, from any thread.
    unsafe { libc::malloc_trim(0) };
}

/// # Safety
///
/// To be called by `dl_iterate_phdr` only.
unsafe extern "C" fn drop_object_text(info: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
    // SAFETY: the loader describes an object that is loaded, with so many program headers.
    let (base, headers) = unsafe {
        let info = &*info;
        (
            info.dlpi_addr,
            std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)),
        )
    };
    // From the C library, which knows: rustix asks the kernel for what it told the program at its start.
    // SAFETY: sysconf with a valid name has no preconditions.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    for header in headers {
        if header.p_type != libc::PT_LOAD || header.p_flags & libc::PF_W != 0 {
            continue;
        }
        let start = base + header.p_vaddr;
        let end = (start + header.p_memsz).next_multiple_of(page);
        let start = start - start % page;
        // SAFETY: the segment is mapped from its file, privately and never for writing, so that all of its pages are
        // as in the file, and come back as they were.
        let released = unsafe {
            madvise(
                ptr::with_exposed_provenance_mut(start as usize),
                (end - start) as usize,
                Advice::LinuxDontNeed,
            )
        };
        if let Err(error) = released {
            tracing::debug!(%error, "the program keeps its pages");
        }
    }
    0
}
