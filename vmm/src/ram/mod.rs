//! Guest memory: its one owner, its backings and its memory slots.

use std::fs::File;
use std::io;
use std::ptr;
use std::sync::Arc;

use husk_devices::page_log::PageLog;
use husk_devices::{GuestMem, GuestMemMmap};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{
    FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap,
};

use crate::layout::Layout;

mod copy;
mod dirty;
mod gate;
mod mapping;
mod pagemap;

pub use copy::MemoryCopy;
pub use dirty::DirtyPages;
pub use gate::CopyGate;
pub use pagemap::PageMap;

/// The backing of guest memory.
#[derive(Debug)]
pub enum MemoryBacking {
    /// Private anonymous memory with transparent huge pages.
    Anonymous,
    /// A memfd, which another process can map.
    Shared,
    /// Pages of this many bytes from the host's hugetlb pool, reserved at start.
    Hugetlb(u64),
    /// A private mapping of a file with all of guest memory, the regions in the order of their addresses. The guest
    /// runs before the file is read. The file stays open and is never written.
    File(MemoryFile),
}

/// A file that holds guest memory.
#[derive(Debug)]
pub struct MemoryFile {
    /// Its name in errors.
    pub name: String,
    /// The file. Nobody may change it while a guest runs from it: truncated, it kills the VMM by SIGBUS.
    pub file: Arc<File>,
}

/// Errors of guest memory.
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
    /// The size of a memory file is not that of the guest's memory.
    #[error("{name}: has {actual} bytes, but the guest's memory has {expected}")]
    FileSize {
        /// Name of the file.
        name: String,
        /// Its size in bytes.
        actual: u64,
        /// Guest memory in bytes.
        expected: u64,
    },
    /// A memory file is a device, a directory or a pipe.
    #[error("{0}: is not a regular file")]
    FileType(String),
    /// A memory file cannot be read.
    #[error("{name}: {source}")]
    File {
        /// Name of the file.
        name: String,
        /// The cause.
        source: io::Error,
    },
    /// KVM refused a memory slot.
    #[error("cannot give the guest its memory: {0}")]
    Slot(#[from] kvm_ioctls::Error),
    /// The regions do not form an address space.
    #[error("guest memory layout: {0}")]
    Layout(String),
    /// Dirty pages are not logged.
    #[error("the pages that the guest writes are not logged")]
    NoLog,
    /// Memory could not be cleared.
    #[error("cannot clear guest memory: {0}")]
    Clear(io::Error),
}

type Region = GuestRegionMmap<AtomicBitmap>;

/// Guest memory. The machine owns it; devices hold the map that [`GuestRam::memory`] returns.
#[derive(Debug)]
pub struct GuestRam {
    memory: GuestMem,
    backing: MemoryBacking,
    /// KVM's memory slots, in the order of the regions.
    slots: Vec<kvm_userspace_memory_region>,
    /// Pages that vhost has written. `None` unless dirty pages are logged.
    log: Option<Arc<PageLog>>,
}

impl MemoryFile {
    /// Checks that this is a regular file of `expected` bytes.
    fn check(&self, expected: u64) -> Result<(), MemoryError> {
        let name = || self.name.clone();
        let metadata = self.file.metadata();
        let metadata = metadata.map_err(|source| MemoryError::File { name: name(), source })?;
        if !metadata.is_file() {
            return Err(MemoryError::FileType(name()));
        }
        let actual = metadata.len();
        if actual != expected {
            return Err(MemoryError::FileSize {
                name: name(),
                actual,
                expected,
            });
        }
        Ok(())
    }
}

impl MemoryBacking {
    /// Maps a region of `size` bytes. `offset` is where its content starts in a memory file.
    fn map(&self, size: u64, offset: u64) -> Result<mapping::Mapping, MemoryError> {
        let mapped = match self {
            Self::Anonymous => mapping::anonymous(size),
            Self::Shared => mapping::shared(size),
            Self::Hugetlb(page) => {
                let page = *page;
                return mapping::hugetlb(size, page).map_err(|source| MemoryError::Hugetlb {
                    size,
                    page,
                    source,
                });
            }
            Self::File(MemoryFile { file, .. }) => {
                mapping::private_file(FileOffset::from_arc(file.clone(), offset), size)
            }
        };
        mapped.map_err(|source| MemoryError::Map { size, source })
    }
}

fn place(mapping: mapping::Mapping, start: GuestAddress) -> Result<Region, MemoryError> {
    Region::new(mapping, start).ok_or_else(|| MemoryError::Layout(format!("region at {:#x} wraps", start.0)))
}

/// Creates a slot of [`GuestRam::register`], or changes its flags.
fn set_slot(vm: &VmFd, slot: kvm_userspace_memory_region) -> Result<(), MemoryError> {
    // SAFETY: the range is a live mapping of exactly this size. Its address stays mapped for the process's life.
    unsafe { vm.set_user_memory_region(slot)? };
    Ok(())
}

fn map_of(regions: Vec<Region>) -> Result<GuestMemMmap, MemoryError> {
    GuestMemMmap::from_regions(regions).map_err(|e| MemoryError::Layout(e.to_string()))
}

impl GuestRam {
    /// Maps the layout's RAM.
    ///
    /// # Errors
    /// The host has too little memory, or a memory file is not one of this layout.
    pub fn new(layout: &Layout, backing: MemoryBacking) -> Result<Self, MemoryError> {
        if let MemoryBacking::File(file) = &backing {
            file.check(layout.ram.iter().map(|range| range.end - range.start).sum())?;
        }
        let (mut regions, mut offset) = (Vec::with_capacity(layout.ram.len()), 0);
        for range in &layout.ram {
            let size = range.end - range.start;
            regions.push(place(backing.map(size, offset)?, GuestAddress(range.start))?);
            offset += size;
        }
        Ok(Self {
            memory: GuestMem::new(map_of(regions)?),
            backing,
            slots: Vec::new(),
            log: None,
        })
    }

    /// Maps the layout's RAM with the content of `file`: as a private mapping of it, or with hugetlb as a copy, since a
    /// mapping of a file has the page size of its file system.
    ///
    /// # Errors
    /// As of [`GuestRam::new`]. The file cannot be read.
    pub fn restore(layout: &Layout, backing: MemoryBacking, file: MemoryFile) -> Result<Self, MemoryError> {
        if !matches!(backing, MemoryBacking::Hugetlb(_)) {
            return Self::new(layout, MemoryBacking::File(file));
        }
        file.check(layout.ram.iter().map(|range| range.end - range.start).sum())?;
        let ram = Self::new(layout, backing)?;
        let MemoryFile { name, file } = file;
        copy::fill(&ram.memory, &file).map_err(|source| MemoryError::File { name, source })?;
        Ok(ram)
    }

    /// The map, as devices hold it.
    pub fn memory(&self) -> &GuestMem {
        &self.memory
    }

    /// Guest memory in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.memory().iter().map(GuestMemoryRegion::len).sum()
    }

    /// True if the host gets pages back that the guest reports as free.
    pub fn reports_free_pages(&self) -> bool {
        // From a private mapping of a file too: anonymous pages take the place of those dropped.
        matches!(self.backing, MemoryBacking::Anonymous | MemoryBacking::File(_))
    }

    /// Gives the memory to a VM, one memory slot for each region.
    ///
    /// # Errors
    /// KVM refuses a slot.
    pub fn register(&mut self, vm: &VmFd) -> Result<(), MemoryError> {
        for (number, region) in (0..).zip(self.memory.memory().iter()) {
            let slot = kvm_userspace_memory_region {
                slot: number,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            set_slot(vm, slot)?;
            self.slots.push(slot);
        }
        Ok(())
    }

    /// Clears all memory and returns its pages to the host. Hugetlb pages stay reserved. A private mapping of a file is
    /// anonymous memory afterwards, at the same addresses, and the file is closed with the last use of the old map.
    ///
    /// # Safety
    /// No vCPU, device or loader uses guest memory meanwhile.
    ///
    /// # Errors
    /// The kernel refuses. Memory may be partly cleared.
    pub unsafe fn clear(&mut self) -> Result<(), MemoryError> {
        let memory = self.memory.memory();
        let advice = match &self.backing {
            // SAFETY: as the caller guarantees.
            MemoryBacking::File(_) => return unsafe { self.leave_file() },
            MemoryBacking::Hugetlb(_) => None,
            MemoryBacking::Anonymous => Some(libc::MADV_DONTNEED),
            // Frees the pages of the memfd, as FALLOC_FL_PUNCH_HOLE does.
            MemoryBacking::Shared => Some(libc::MADV_REMOVE),
        };
        for region in memory.iter() {
            let (base, len) = (region.as_ptr(), region.size());
            region.bitmap().mark_dirty(0, len);
            match advice {
                // SAFETY: the range is one mapping of guest memory. Without its pages it reads as zero, as intended. No
                // vCPU or device runs, as the caller guarantees.
                Some(advice) => match unsafe { libc::madvise(base.cast(), len, advice) } {
                    0 => {}
                    _ => return Err(MemoryError::Clear(io::Error::last_os_error())),
                },
                // SAFETY: the range is a live, writable mapping of len bytes, and no thread reads it now.
                None => unsafe { ptr::write_bytes(base, 0, len) },
            }
        }
        Ok(())
    }

    /// # Safety
    /// As of [`GuestRam::clear`].
    unsafe fn leave_file(&mut self) -> Result<(), MemoryError> {
        let mut regions = Vec::new();
        for region in self.memory.memory().iter() {
            // SAFETY: guest memory is not in use, as the caller guarantees.
            let mapping = unsafe { mapping::replace_by_anonymous(region) }.map_err(MemoryError::Clear)?;
            let region = place(mapping, region.start_addr())?;
            region.bitmap().mark_dirty(0, region.size());
            regions.push(region);
        }
        let map = map_of(regions)?;
        self.memory
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .replace(map);
        self.backing = MemoryBacking::Anonymous;
        Ok(())
    }
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

#[cfg(test)]
mod tests;
