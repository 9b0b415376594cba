//! The memory that a VM's container needs in addition to the guest's.

use husk_vmi::{Topology, VmPlan};
use oci_spec::runtime::{LinuxMemory, LinuxResources, Spec};

use super::error::SpecError;

const MIB: u64 = 1 << 20;
/// Bytes for the VMM: its stacks, its rings and the kernel's memory for it.
///
/// `cargo xtask bench pod` measures 1.8 MiB beside guest memory and page cache, with one vCPU and no disk. The rest is
/// for disks: up to 1 MiB of bounce buffers, and about 3 MiB of tables of a qcow2 image of 10 GiB and its overlay. The
/// program's text is page cache, which the kernel can reclaim.
const FIXED: u64 = 8 * MIB;
/// Page tables of guest and host, each with an entry of 8 bytes for 4 KiB.
const GUEST_PER_BYTE: u64 = 512;
/// Bytes for a vCPU. Its state in kernel and VMM is far smaller. The rest of the first one's is for the buffers of a
/// passed-through LUN: at most 16 of 512 KiB.
const PER_VCPU: u64 = 8 * MIB;

/// Returns the bytes that a VM's container needs in addition to the guest's memory.
#[must_use]
pub fn overhead_bytes(guest_bytes: u64, topology: Topology) -> u64 {
    FIXED + guest_bytes / GUEST_PER_BYTE + PER_VCPU * u64::from(topology.vcpus())
}

/// The memory limits of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Page size and limit of huge pages, in bytes.
    pub hugepages: Vec<(u64, u64)>,
}

impl MemoryLimit {
    /// The limits of a container.
    #[must_use]
    pub fn of(spec: &Spec) -> MemoryLimit {
        let linux = spec.linux().as_ref();
        MemoryLimit::of_resources(linux.and_then(|linux| linux.resources().as_ref()))
    }

    /// The limits of a container after an update, if there is one. It leaves alone what it does not name.
    #[must_use]
    pub fn updated(spec: &Spec, update: Option<&LinuxResources>) -> MemoryLimit {
        let mut limit = MemoryLimit::of(spec);
        let Some(update) = update else {
            return limit;
        };
        let MemoryLimit { memory, hugepages } = MemoryLimit::of_resources(Some(update));
        let named = update.memory().as_ref().and_then(LinuxMemory::limit);
        if named.is_some_and(|bytes| bytes != 0) {
            limit.memory = memory;
        }
        limit
            .hugepages
            .retain(|(page, _)| hugepages.iter().all(|(named, _)| named != page));
        limit.hugepages.extend(hugepages);
        limit
    }

    /// The limits of an update.
    #[must_use]
    pub fn of_resources(resources: Option<&LinuxResources>) -> MemoryLimit {
        let memory = resources.and_then(|resources| resources.memory().as_ref()?.limit());
        let hugepages = resources.and_then(|resources| resources.hugepage_limits().as_ref());
        MemoryLimit {
            // Zero and negative values mean no limit.
            memory: memory
                .and_then(|bytes| u64::try_from(bytes).ok())
                .filter(|bytes| *bytes > 0),
            hugepages: hugepages
                .into_iter()
                .flatten()
                .filter_map(|limit| Some((page_size(limit.page_size())?, u64::try_from(limit.limit()).ok()?)))
                .collect(),
        }
    }

    /// Checks that a VM fits.
    ///
    /// # Errors
    /// A limit is too small. The error names the numbers.
    pub fn check(&self, plan: &VmPlan, container: &str, field: &str) -> Result<(), SpecError> {
        let guest = plan.memory.guest_bytes;
        let overhead = overhead_bytes(guest, plan.topology);
        let counted = match plan.memory.hugepage_bytes {
            Some(page) => {
                let limit = self.hugepages.iter().find(|(size, _)| *size == page);
                if let Some((_, limit)) = limit.filter(|(_, limit)| *limit < guest) {
                    return Err(SpecError::HugepageLimit {
                        container: container.to_owned(),
                        page,
                        limit: *limit,
                        guest,
                        field: field.to_owned(),
                    });
                }
                0
            }
            None => guest,
        };
        match self.memory {
            Some(limit) if limit < counted.saturating_add(overhead) => Err(SpecError::MemoryLimit {
                container: container.to_owned(),
                limit,
                guest: counted,
                overhead,
                field: field.to_owned(),
            }),
            _ => Ok(()),
        }
    }
}

/// Parses a page size such as `2MB` or `1GB`. Units are powers of 1024.
fn page_size(text: &str) -> Option<u64> {
    let units = [("KB", 10), ("MB", 20), ("GB", 30)];
    let (number, shift) = units
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))?;
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}
