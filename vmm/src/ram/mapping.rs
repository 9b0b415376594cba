//! Mappings of guest memory, one function for each kind of backing.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;

use vm_memory::bitmap::AtomicBitmap;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, MmapRegion};

/// Alignment of mappings. Huge pages need it in both address spaces.
pub(super) const THP: usize = 2 << 20;

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
const ANONYMOUS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
const PRIVATE_FILE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_NORESERVE;

pub(super) type Mapping = MmapRegion<AtomicBitmap>;

fn length(size: u64) -> io::Result<usize> {
    usize::try_from(size).map_err(|_| io::ErrorKind::OutOfMemory.into())
}

const PAGE: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

fn bitmap(size: usize) -> AtomicBitmap {
    AtomicBitmap::new(size, PAGE)
}

/// Reserves `len` bytes of address space, aligned to [`THP`], as an anonymous mapping.
fn reserve(len: usize) -> io::Result<*mut libc::c_void> {
    let reserved = len.checked_add(THP).ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: a new anonymous mapping at an address that the kernel chooses overlaps no other mapping.
    let base = unsafe { libc::mmap(ptr::null_mut(), reserved, READ_WRITE, ANONYMOUS, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let head = (base as usize).next_multiple_of(THP) - base as usize;
    // SAFETY: head < THP, so base + head lies inside the mapping.
    let start = unsafe { base.byte_add(head) };
    // SAFETY: both ranges are inside the mapping just made, outside [start, start + len), and unused.
    unsafe {
        if head > 0 {
            libc::munmap(base, head);
        }
        // Never empty: head is less than THP.
        libc::munmap(start.byte_add(len), THP - head);
    }
    Ok(start)
}

/// Asks for huge pages, and keeps the range out of core dumps.
///
/// # Safety
/// [start, start + len) is a live mapping of guest memory.
unsafe fn advise(start: *mut libc::c_void, len: usize) {
    // Errors are ignored: without huge pages the guest is slower, but works.
    // SAFETY: neither advice changes the content of the mapping, which is live as the caller guarantees.
    unsafe {
        libc::madvise(start, len, libc::MADV_HUGEPAGE);
        libc::madvise(start, len, libc::MADV_DONTDUMP);
    }
}

/// # Safety
/// [start, start + len) is a live, readable and writable mapping with these `flags` that stays mapped for the process's
/// life: the builder does not unmap memory that it is given.
unsafe fn adopt(
    start: *mut libc::c_void,
    len: usize,
    flags: libc::c_int,
    file: Option<FileOffset>,
) -> io::Result<Mapping> {
    // SAFETY: as the caller guarantees.
    let mut builder =
        unsafe { MmapRegionBuilder::new_with_bitmap(len, bitmap(len)).with_raw_mmap_pointer(start.cast()) };
    if let Some(file) = file {
        builder = builder.with_file_offset(file);
    }
    builder
        .with_mmap_prot(READ_WRITE)
        .with_mmap_flags(flags)
        .build()
        .map_err(io::Error::other)
}

/// Private anonymous memory with transparent huge pages.
pub(super) fn anonymous(size: u64) -> io::Result<Mapping> {
    let len = length(size)?;
    let start = reserve(len)?;
    // SAFETY: [start, start + len) is a live mapping with these flags that nothing else refers to.
    unsafe {
        advise(start, len);
        adopt(start, len, ANONYMOUS, None)
    }
}

/// Replaces the pages of `mapping`, whatever they are, by empty anonymous memory at the same address.
///
/// # Safety
/// `mapping` is guest memory that no vCPU or device uses now.
pub(super) unsafe fn replace_by_anonymous(mapping: &Mapping) -> io::Result<Mapping> {
    let (start, len) = (mapping.as_ptr().cast::<libc::c_void>(), mapping.size());
    // SAFETY: MAP_FIXED replaces only [start, start + len), which is one mapping of guest memory. Nothing in this
    // process relies on its content, as the caller guarantees, and the addresses stay valid.
    let at = unsafe { libc::mmap(start, len, READ_WRITE, ANONYMOUS | libc::MAP_FIXED, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping just made.
    unsafe {
        advise(start, len);
        adopt(start, len, ANONYMOUS, None)
    }
}

/// A private mapping of `size` bytes of `file`: what the guest writes stays in this process.
pub(super) fn private_file(file: FileOffset, size: u64) -> io::Result<Mapping> {
    let len = length(size)?;
    let offset = libc::off_t::try_from(file.start()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let start = reserve(len)?;
    let (fd, flags) = (file.file().as_raw_fd(), PRIVATE_FILE | libc::MAP_FIXED);
    // SAFETY: MAP_FIXED replaces only the range just reserved, which nothing else refers to.
    let at = unsafe { libc::mmap(start, len, READ_WRITE, flags, fd, offset) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping just made. Its file stays open with it.
    unsafe {
        advise(start, len);
        adopt(start, len, PRIVATE_FILE, Some(file))
    }
}

fn memfd(size: u64, flags: libc::c_uint) -> io::Result<File> {
    // SAFETY: the name is a valid C string.
    let fd = unsafe { libc::memfd_create(c"guest".as_ptr(), libc::MFD_CLOEXEC | flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fd was just created and has no other owner.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size)?;
    Ok(file)
}

fn shared_file(file: File, len: usize, hugetlb: bool) -> io::Result<Mapping> {
    MmapRegionBuilder::new_with_bitmap(len, bitmap(len))
        .with_file_offset(FileOffset::new(file, 0))
        .with_mmap_prot(READ_WRITE)
        .with_mmap_flags(libc::MAP_SHARED)
        // The balloon leaves reserved pages alone by this.
        .with_hugetlbfs(hugetlb)
        .build()
        .map_err(io::Error::other)
}

/// A memfd that other processes may map.
pub(super) fn shared(size: u64) -> io::Result<Mapping> {
    shared_file(memfd(size, 0)?, length(size)?, false)
}

/// A memfd of reserved huge pages of `page` bytes.
pub(super) fn hugetlb(size: u64, page: u64) -> io::Result<Mapping> {
    if !page.is_power_of_two() || page < 4096 || !size.is_multiple_of(page) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "guest memory (below and above 4 GiB) must be a multiple of the page size",
        ));
    }
    let flags = libc::MFD_HUGETLB | (page.trailing_zeros() << libc::MFD_HUGE_SHIFT);
    let file = memfd(size, flags)?;
    let bytes = i64::try_from(size).unwrap_or(i64::MAX);
    // Reserves the pages now: a lack of pages is an error here, and not SIGBUS while the guest runs.
    // SAFETY: fallocate on an owned descriptor touches no memory of this process.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes) } != 0 {
        return Err(io::Error::last_os_error());
    }
    shared_file(file, length(size)?, true)
}
