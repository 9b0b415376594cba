//! Guest memory: its backing, its mapping, and how a reset clears it.

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use std::ptr;

use husk_devices::{GuestMem, GuestMemMmap};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

use crate::layout::Layout;

/// The backing of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryBacking {
    /// Private anonymous memory with transparent huge pages.
    Anonymous,
    /// Pages of this many bytes from the host's hugetlb pool, reserved at start.
    Hugetlb(u64),
}

/// Errors of allocating guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The memory could not be mapped.
    #[error("cannot map {size} bytes of guest memory: {source}")]
    Map {
        /// Bytes.
        size: u64,
        /// The cause.
        source: io::Error,
    },
    /// The hugetlb pool has too few free pages of this size.
    #[error("cannot reserve {size} bytes in {page}-byte huge pages: {source} (see /sys/kernel/mm/hugepages)")]
    Hugetlb {
        /// Bytes.
        size: u64,
        /// Page size in bytes.
        page: u64,
        /// The cause.
        source: io::Error,
    },
    /// KVM refused a memory slot.
    #[error("cannot give the guest its memory: {0}")]
    Slot(#[from] kvm_ioctls::Error),
    /// The regions do not form an address space.
    #[error("guest memory layout: {0}")]
    Layout(String),
}

const THP: usize = 2 << 20;

/// Maps the layout's RAM.
pub fn allocate(layout: &Layout, backing: MemoryBacking) -> Result<GuestMem, MemoryError> {
    let mut regions = Vec::with_capacity(layout.ram.len());
    for range in &layout.ram {
        let size = range.end - range.start;
        let region = match backing {
            MemoryBacking::Anonymous => {
                anonymous(size).map_err(|source| MemoryError::Map { size, source })?
            }
            MemoryBacking::Hugetlb(page) => {
                hugetlb(size, page).map_err(|source| MemoryError::Hugetlb { size, page, source })?
            }
        };
        let region = GuestRegionMmap::new(region, GuestAddress(range.start))
            .ok_or_else(|| MemoryError::Layout(format!("region at {:#x} wraps", range.start)))?;
        regions.push(region);
    }
    let memory = GuestMemMmap::from_regions(regions).map_err(|e| MemoryError::Layout(e.to_string()))?;
    Ok(GuestMem::new(memory))
}

fn length(size: u64) -> io::Result<usize> {
    usize::try_from(size).map_err(|_| io::ErrorKind::OutOfMemory.into())
}

fn bitmap(size: usize) -> AtomicBitmap {
    // SAFETY: sysconf with a valid name has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let page = usize::try_from(page)
        .ok()
        .and_then(std::num::NonZeroUsize::new)
        .unwrap_or(PAGE);
    AtomicBitmap::new(size, page)
}

const PAGE: std::num::NonZeroUsize = std::num::NonZeroUsize::new(4096).unwrap();

fn anonymous(size: u64) -> io::Result<MmapRegion<AtomicBitmap>> {
    let len = length(size)?;
    let reserved = len.checked_add(THP).ok_or(io::ErrorKind::OutOfMemory)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new anonymous mapping at an address that the kernel chooses overlaps no other mapping.
    let base = unsafe { libc::mmap(ptr::null_mut(), reserved, protection, flags, -1, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // Huge pages need 2 MiB alignment in both address spaces. Unmap the rest on either side.
    let head = (base as usize).next_multiple_of(THP) - base as usize;
    // SAFETY: head < THP, so base + head lies inside the mapping.
    let start = unsafe { base.byte_add(head) };
    // SAFETY: both ranges are inside the mapping just made, outside [start, start + len), and unused.
    unsafe {
        if head > 0 {
            libc::munmap(base, head);
        }
        let tail = THP - head;
        if tail > 0 {
            libc::munmap(start.byte_add(len), tail);
        }
        // Errors are ignored: without huge pages the guest is slower, but works.
        libc::madvise(start, len, libc::MADV_HUGEPAGE);
        libc::madvise(start, len, libc::MADV_DONTDUMP);
    }
    // SAFETY: [start, start + len) is a live mapping with these flags that nothing else refers to. The builder does not
    // unmap memory that it is given; guest memory lives as long as the process.
    let builder =
        unsafe { MmapRegionBuilder::new_with_bitmap(len, bitmap(len)).with_raw_mmap_pointer(start.cast()) };
    builder
        .with_mmap_prot(protection)
        .with_mmap_flags(flags)
        .build()
        .map_err(io::Error::other)
}

fn hugetlb(size: u64, page: u64) -> io::Result<MmapRegion<AtomicBitmap>> {
    let len = length(size)?;
    if !page.is_power_of_two() || page < 4096 || !size.is_multiple_of(page) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "guest memory (below and above 4 GiB) must be a multiple of the page size",
        ));
    }
    let flags = libc::MFD_CLOEXEC | libc::MFD_HUGETLB | (page.trailing_zeros() << libc::MFD_HUGE_SHIFT);
    // SAFETY: the name is a valid C string.
    let fd = unsafe { libc::memfd_create(c"guest".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fd was just created and has no other owner.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size)?;
    // Reserves the pages now: a lack of pages is an error here, and not SIGBUS while the guest runs.
    // SAFETY: fallocate on an owned descriptor touches no memory of this process.
    if unsafe { libc::fallocate(fd, 0, 0, i64::try_from(size).unwrap_or(i64::MAX)) } != 0 {
        return Err(io::Error::last_os_error());
    }
    MmapRegionBuilder::new_with_bitmap(len, bitmap(len))
        .with_file_offset(FileOffset::new(file, 0))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_SHARED)
        .build()
        .map_err(io::Error::other)
}

/// Registers guest memory with KVM, one memory slot for each region.
pub fn register(vm: &VmFd, memory: &GuestMemMmap) -> Result<(), MemoryError> {
    for (slot, region) in memory.iter().enumerate() {
        let region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the range is a live mapping of exactly this size that stays mapped for the process's life.
        unsafe { vm.set_user_memory_region(region)? };
    }
    Ok(())
}

/// Guest memory from address 0 to the end of its first region, for exclusive use by one thread.
///
/// # Safety
/// Nothing else reads or writes this memory while the result lives: no vCPU runs, no device is active, and no other
/// thread of the loader has it.
#[expect(clippy::mut_from_ref, reason = "the caller guarantees exclusive use")]
pub unsafe fn exclusive(memory: &GuestMemMmap) -> Option<&mut [u8]> {
    let region = memory.iter().find(|r| r.start_addr().0 == 0)?;
    region.bitmap().mark_dirty(0, region.len() as usize);
    // SAFETY: a live, readable and writable mapping of that many initialised bytes, which lives as long as `memory`
    // and, as the caller guarantees, has no other user.
    Some(unsafe { std::slice::from_raw_parts_mut(region.as_ptr(), region.len() as usize) })
}

/// Clears all guest memory and returns its pages to the host. Hugetlb pages stay reserved.
pub fn clear(memory: &GuestMemMmap, backing: MemoryBacking) -> io::Result<()> {
    for region in memory.iter() {
        let (base, len) = (region.as_ptr(), region.len() as usize);
        match backing {
            MemoryBacking::Anonymous => {
                // SAFETY: the range is a private anonymous mapping of this process. Dropping its pages makes it read as
                // zero, as intended. No vCPU or device runs, as the caller guarantees.
                if unsafe { libc::madvise(base.cast(), len, libc::MADV_DONTNEED) } != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            // SAFETY: the range is a live, writable mapping of len bytes, and no thread reads it now.
            MemoryBacking::Hugetlb(_) => unsafe { ptr::write_bytes(base, 0, len) },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddressSpace};

    use super::*;

    #[test]
    fn memory_is_aligned_for_huge_pages_and_cleared() {
        let layout = Layout::new(64 << 20, 40).unwrap();
        let memory = allocate(&layout, MemoryBacking::Anonymous).unwrap();
        let memory = memory.memory();
        let region = memory.iter().next().unwrap();
        assert_eq!(region.as_ptr() as usize % THP, 0);
        memory.write_obj(0xdead_beef_u32, GuestAddress(0x1000)).unwrap();
        clear(&memory, MemoryBacking::Anonymous).unwrap();
        assert_eq!(memory.read_obj::<u32>(GuestAddress(0x1000)).unwrap(), 0);
    }

    #[test]
    fn missing_huge_pages_are_an_error_at_start() {
        let layout = Layout::new(1 << 40, 46).unwrap();
        let error = allocate(&layout, MemoryBacking::Hugetlb(2 << 20))
            .unwrap_err()
            .to_string();
        assert!(error.contains("2097152-byte huge pages"), "{error}");
    }
}
