//! Returns memory of the VMM's own process to the host.

use std::ffi::{c_int, c_void};
use std::ptr;

use rustix::mm::{Advice, madvise};

/// Drops the pages of the program's text and constants. The kernel reads them from the program's file again on access.
///
/// The code that builds a machine and loads a kernel, more than a third of the program, is not used again before the
/// next reboot. A kernel frees its init sections for the same reason.
pub fn drop_text_pages() {
    // SAFETY: the callback is only called during this call, with what `dl_iterate_phdr` promises, and uses no data.
    unsafe { libc::dl_iterate_phdr(Some(drop_object_text), ptr::null_mut()) };
}

/// Lets all threads share one arena of the allocator. Call it before there are several.
///
/// The C library gives each thread an arena of its own otherwise: four system calls and some pages for threads that
/// hardly allocate.
pub fn share_heap() {
    // SAFETY: no other thread runs yet. It fails only for an unknown parameter.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Returns unused memory of the allocator to the host: the removal of a thousand disks leaves a mebibyte.
pub fn trim_heap() {
    // SAFETY: may be called at any time, from any thread.
    unsafe { libc::malloc_trim(0) };
}

/// # Safety
///
/// Only `dl_iterate_phdr` may call this.
unsafe extern "C" fn drop_object_text(info: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
    // SAFETY: the dynamic loader describes a loaded object with this number of program headers.
    let (base, headers) = unsafe {
        let info = &*info;
        (
            info.dlpi_addr,
            std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)),
        )
    };
    // From the C library, which has the value: rustix would read the auxiliary vector by a system call.
    // SAFETY: sysconf with a valid name has no preconditions.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    for header in headers {
        if header.p_type != libc::PT_LOAD || header.p_flags & libc::PF_W != 0 {
            continue;
        }
        let start = base + header.p_vaddr;
        let end = (start + header.p_memsz).next_multiple_of(page);
        let start = start - start % page;
        // SAFETY: the segment is mapped from its file, privately and never for writing: its pages equal the file's, and
        // the kernel restores them unchanged.
        let released = unsafe {
            madvise(
                ptr::with_exposed_provenance_mut(start as usize),
                (end - start) as usize,
                Advice::LinuxDontNeed,
            )
        };
        if let Err(error) = released {
            tracing::debug!(%error, "cannot drop the program's text pages");
        }
    }
    0
}
