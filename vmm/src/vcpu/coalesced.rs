//! Port writes that KVM collects in a ring instead of leaving the guest (Documentation/virt/kvm/api.rst,
//! KVM_REGISTER_COALESCED_MMIO).
//!
//! These ports select what the next access to a data port is about. That access leaves the guest, and the writes
//! before it are taken from the ring first. Without this, a third of a booting guest's exits are writes to 0xCF8.

use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use husk_devices::bus::Bus;
use husk_devices::legacy::rtc;
use kvm_bindings::{KVM_COALESCED_MMIO_PAGE_OFFSET, kvm_coalesced_mmio, kvm_coalesced_mmio_ring};
use kvm_ioctls::{IoEventAddress, VcpuFd, VmFd};
use vm_memory::mmap::{MmapRegion, MmapRegionBuilder};
use vm_memory::{Bytes, VolatileMemory, VolatileMemoryError};

use super::NewVcpu;
use crate::kvm::{KvmError, failed};

/// Address and length in bytes of each range: the address of PCI configuration, the index of the RTC.
const RANGES: [(u64, u32); 2] = [(0xcf8, 4), (rtc::PORT, 1)];

const PAGE: usize = 4096;
const FIRST: usize = std::mem::offset_of!(kvm_coalesced_mmio_ring, first);
const LAST: usize = std::mem::offset_of!(kvm_coalesced_mmio_ring, last);
const HEADER: usize = size_of::<kvm_coalesced_mmio_ring>();
const ENTRY: usize = size_of::<kvm_coalesced_mmio>();
const ENTRIES: u32 = ((PAGE - HEADER) / ENTRY) as u32;

/// The ring of a VM.
#[derive(Debug)]
pub struct CoalescedWrites {
    page: Mutex<MmapRegion>,
}

impl CoalescedWrites {
    /// Makes KVM collect the writes of all vCPUs of `vm`, of which `vcpu` is any.
    ///
    /// # Errors
    /// Failures of KVM.
    pub fn new(vm: &VmFd, vcpu: &NewVcpu) -> Result<Self, KvmError> {
        let page = map(&vcpu.fd).map_err(failed("map the ring of coalesced writes"))?;
        for (port, length) in RANGES {
            vm.register_coalesced_mmio(IoEventAddress::Pio(port), length)
                .map_err(failed("coalesce writes to a port"))?;
        }
        Ok(Self {
            page: Mutex::new(page),
        })
    }

    /// Passes the collected writes to `ports`, in the guest's order. Called after each exit, before it is served.
    ///
    /// The lock is held until the devices have them, so that a vCPU that finds the ring empty finds the effect of what
    /// another vCPU took from it.
    pub(super) fn apply(&self, ports: &Bus) {
        let page = self.page.lock().unwrap_or_else(PoisonError::into_inner);
        // Errors are those of addresses beyond the page.
        let _ = drain(&page, ports);
    }
}

impl Drop for CoalescedWrites {
    fn drop(&mut self) {
        let page = self.page.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `map` made this mapping of one page, and its only owner is being dropped.
        unsafe { libc::munmap(page.as_ptr().cast(), PAGE) };
    }
}

/// Maps the ring, which all vCPUs of a VM share.
fn map(vcpu: &VcpuFd) -> Result<MmapRegion, kvm_ioctls::Error> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    let offset = i64::from(KVM_COALESCED_MMIO_PAGE_OFFSET) * PAGE as i64;
    // SAFETY: a new mapping at an address that the kernel chooses overlaps no other mapping.
    let page = unsafe { libc::mmap(ptr::null_mut(), PAGE, protection, flags, vcpu.as_raw_fd(), offset) };
    if page == libc::MAP_FAILED {
        return Err(kvm_ioctls::Error::last());
    }
    // SAFETY: the mapping has one page, and lives as long as its `CoalescedWrites`.
    let builder = unsafe { MmapRegionBuilder::new(PAGE).with_raw_mmap_pointer(page.cast()) };
    builder
        .with_mmap_prot(protection)
        .with_mmap_flags(flags)
        .build()
        .map_err(|_| kvm_ioctls::Error::new(libc::EINVAL))
}

fn drain(page: &MmapRegion, ports: &Bus) -> Result<(), VolatileMemoryError> {
    let ring = page.as_volatile_slice();
    let mut first: u32 = ring.load(FIRST, Ordering::Relaxed)?;
    // The kernel fills an entry before it moves `last` over it.
    while ring.load::<u32>(LAST, Ordering::Acquire)? != first {
        let at = HEADER + first as usize * ENTRY;
        let port: u64 = ring.read_obj(at + std::mem::offset_of!(kvm_coalesced_mmio, phys_addr))?;
        let length: u32 = ring.read_obj(at + std::mem::offset_of!(kvm_coalesced_mmio, len))?;
        let data: [u8; 8] = ring.read_obj(at + std::mem::offset_of!(kvm_coalesced_mmio, data))?;
        if let Some(data) = data.get(..length as usize) {
            ports.write(port, data);
        }
        first = (first + 1) % ENTRIES;
        ring.store(first, FIRST, Ordering::Release)?;
    }
    Ok(())
}
