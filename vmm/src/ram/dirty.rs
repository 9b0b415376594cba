//! The pages of guest memory that are written: by vCPUs (KVM's dirty log), by this process (the bitmap of the mapping),
//! and by the kernel for a device (a [`PageLog`]).

use std::ops::Deref;
use std::sync::Arc;

use husk_devices::page_log::PageLog;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::VmFd;
use vm_memory::{GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion};

use super::pagemap::PAGE;
use super::{GuestRam, MemoryError, Region, set_slot};

/// Pages of guest memory that were written. For each region one bit for each page of 4 KiB, 64 to a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyPages(Vec<Vec<u64>>);

impl DirtyPages {
    /// These pages: for each region, in the order of addresses, one bit for each page.
    #[cfg(test)]
    pub(super) fn of_regions(regions: Vec<Vec<u64>>) -> Self {
        Self(regions)
    }

    /// Bytes of these pages.
    pub fn bytes(&self) -> u64 {
        let pages = self.0.iter().flatten().map(|word| u64::from(word.count_ones()));
        pages.sum::<u64>() * PAGE as u64
    }

    /// For each of `count` pages from byte `offset` of the region of this index on: true if it was written. The offset is
    /// a multiple of the page size.
    pub(super) fn of(&self, region: usize, offset: u64, count: usize) -> Vec<bool> {
        let words = self.0.get(region).map(Vec::as_slice).unwrap_or_default();
        let first = offset as usize / PAGE;
        let pages = first..first + count;
        pages
            .map(|page| {
                words
                    .get(page / 64)
                    .is_some_and(|word| word >> (page % 64) & 1 != 0)
            })
            .collect()
    }
}

/// The bitmap of what this process wrote to a region.
fn written_here(region: &Region) -> Vec<u64> {
    // The bitmap of the trait is a slice, which cannot be cleared.
    region.deref().bitmap().get_and_reset()
}

impl GuestRam {
    /// Logs the pages that are written from now on. Returns the log for what the kernel writes for devices; they must
    /// have it before they work on. No vCPU or device runs.
    ///
    /// # Errors
    /// KVM refuses. No log is left then.
    pub fn start_log(&mut self, vm: &VmFd) -> Result<Arc<PageLog>, MemoryError> {
        let memory = self.memory.memory();
        let log = self
            .log
            .insert(Arc::new(PageLog::new(memory.last_addr().0 + 1)))
            .clone();
        let set = self.slots.iter().try_for_each(|slot| {
            set_slot(
                vm,
                kvm_userspace_memory_region {
                    flags: KVM_MEM_LOG_DIRTY_PAGES,
                    ..*slot
                },
            )
        });
        set.inspect_err(|_| self.stop_log(vm))?;
        for region in memory.iter() {
            written_here(region);
        }
        Ok(log)
    }

    /// Returns the pages that were written since the start of the log, or the last call. A page that is written meanwhile
    /// may be among them, and is in the next result.
    ///
    /// # Errors
    /// There is no log, or KVM refuses. Pages may be lost then.
    pub fn take_dirty(&self, vm: &VmFd) -> Result<DirtyPages, MemoryError> {
        let log = self.log.as_ref().ok_or(MemoryError::NoLog)?;
        let memory = self.memory.memory();
        let taken = memory.iter().zip(&self.slots).map(|(region, slot)| {
            let mut pages = vm.get_dirty_log(slot.slot, region.size())?;
            for (page, here) in pages.iter_mut().zip(written_here(region)) {
                *page |= here;
            }
            log.take(region.start_addr().0, &mut pages);
            Ok(pages)
        });
        taken.collect::<Result<_, MemoryError>>().map(DirtyPages)
    }

    /// True if dirty pages are logged.
    pub fn is_logged(&self) -> bool {
        self.log.is_some()
    }

    /// Ends the log. Idempotent.
    pub fn stop_log(&mut self, vm: &VmFd) {
        if self.log.take().is_none() {
            return;
        }
        for slot in &self.slots {
            if let Err(error) = set_slot(vm, *slot) {
                // Writes stay slow, and nothing else changes.
                tracing::warn!(%error, slot = slot.slot, "dirty pages are still logged");
            }
        }
    }
}
