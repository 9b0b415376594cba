//! CPUID of a guest: the host's as KVM supports it, without the features withheld here (each with its reason), and with
//! the manifest's topology.
//!
//! Leaves and bits are those of Intel's SDM volume 2 (CPUID) and AMD's APM volume 3, appendix E.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

mod amd;
mod arch_capabilities;
mod bit;
mod check;
mod names;
mod register;
mod topology;

use register::field;
use topology::bits;

pub use arch_capabilities::{ARCH_CAPABILITIES, check_arch_capabilities};
pub use bit::{CpuidBit, Register};
pub use check::{CpuMismatch, check_saved};
pub use topology::{Topology, TopologyError};

use Register::{Eax, Ebx, Ecx, Edx};

fn register(entry: &mut kvm_cpuid_entry2, which: Register) -> &mut u32 {
    match which {
        Eax => &mut entry.eax,
        Ebx => &mut entry.ebx,
        Ecx => &mut entry.ecx,
        Edx => &mut entry.edx,
    }
}

/// Features withheld from the guest: leaf, subleaf, register, mask, reason.
const WITHHELD: &[(u32, u32, Register, u32, &str)] = &[
    (0x1, 0, Ecx, 1 << 2, "DTES64: 64-bit area of DS"),
    (
        0x1,
        0,
        Ecx,
        1 << 3,
        "MONITOR: waiting in the guest would keep a host core from other VMs",
    ),
    (
        0x1,
        0,
        Ecx,
        1 << 5,
        "VMX: nested state is neither paused, reset nor saved",
    ),
    (
        0x1,
        0,
        Ecx,
        1 << 15,
        "PDCM: describes the performance counters that are withheld",
    ),
    (0x1, 0, Edx, 1 << 21, "DS: the debug store needs the counters"),
    (0x7, 0, Ebx, 1 << 2, "SGX: no enclave memory is given"),
    (0x7, 0, Ecx, 1 << 5, "WAITPKG: see MONITOR"),
    (
        0x7,
        0,
        Ecx,
        1 << 7,
        "CET_SS: the shadow stack pointer is not in a vCPU's saved state",
    ),
    (0x7, 0, Ecx, 1 << 30, "SGX launch control: as SGX"),
    (
        0x7,
        0,
        Edx,
        1 << 22 | 1 << 24 | 1 << 25,
        "AMX: its tiles need a permission that the VMM does not request",
    ),
    (0x7, 1, Eax, 1 << 21, "AMX-FP16: as AMX"),
    (0x7, 1, Edx, 1 << 8, "AMX-COMPLEX: as AMX"),
    (0xd, 0, Eax, 1 << 17 | 1 << 18, "XTILECFG, XTILEDATA: as AMX"),
    (0xd, 1, Eax, 1 << 4, "XFD: as AMX"),
    (0x8000_0001, 0, Ecx, 1 << 2, "SVM: as VMX"),
    (
        0x8000_0001,
        0,
        Ecx,
        1 << 23,
        "core performance counters: withheld",
    ),
    (
        0x8000_0007,
        0,
        Edx,
        1 << 8,
        "invariant TSC: kvmclock follows a pause, a bare TSC does not",
    ),
];

/// Leaves that the guest reads as zero, with the reason.
const EMPTIED: &[(u32, &str)] = &[
    (
        0xa,
        "performance counters: their state is neither kept nor isolated between VMs",
    ),
    (0x12, "SGX: withheld"),
    (0x1d, "AMX: withheld"),
    (0x1e, "AMX: withheld"),
    (0x8000_000a, "SVM: withheld"),
    (
        0x8000_001f,
        "memory encryption: a guest that sees it reads an MSR that only an encrypted one has",
    ),
    (0x8000_0022, "performance counters: withheld"),
];

/// KVM's own leaves (Documentation/virt/kvm/x86/cpuid.rst), and the timing leaf that guests look for with them.
const KVM_SIGNATURE: u32 = 0x4000_0000;
const KVM_TIMING: u32 = 0x4000_0010;
/// Frequency of the local APIC's bus in KVM, in kHz.
const APIC_BUS_KHZ: u32 = 1_000_000;

/// Properties of the host that the policy depends on and CPUID does not report.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostTiming {
    /// The guest's TSC frequency in kHz; 0 if unknown.
    pub tsc_khz: u32,
    /// True if TSC-deadline timers work. KVM reports this by a capability.
    pub tsc_deadline: bool,
}

/// True for leaves that are not copied from the host. 0x80000026 describes dies, which the guest does not have.
fn is_rewritten(leaf: u32) -> bool {
    matches!(leaf, 0xb | 0x1f | KVM_TIMING | amd::TOPOLOGY | 0x8000_0026)
}

/// CPUID of vCPU `index`, derived from the entries that the host's KVM supports.
pub fn for_vcpu(
    supported: &[kvm_cpuid_entry2],
    topology: Topology,
    timing: HostTiming,
    index: u32,
) -> Vec<kvm_cpuid_entry2> {
    let emptied = |leaf| EMPTIED.iter().any(|(empty, _)| *empty == leaf);
    let kept = |e: &&kvm_cpuid_entry2| !is_rewritten(e.function) && !emptied(e.function);
    let mut entries: Vec<_> = supported.iter().filter(kept).copied().collect();
    let amd = amd::is_vendor(&entries);
    let apic_id = topology.apic_id(index);
    if amd {
        amd::add_caches(&mut entries);
    }
    for entry in &mut entries {
        for &(leaf, subleaf, which, mask, _) in WITHHELD {
            if entry.function == leaf && entry.index == subleaf {
                *register(entry, which) &= !mask;
            }
        }
        apply_topology(entry, topology, apic_id, amd);
        match entry.function {
            0x0 => entry.eax = entry.eax.max(0xb),
            0x1 => {
                field(&mut entry.ecx, 24, 1, timing.tsc_deadline.into());
                field(&mut entry.ecx, 31, 1, 1); // hypervisor present
            }
            KVM_SIGNATURE if timing.tsc_khz != 0 => entry.eax = entry.eax.max(KVM_TIMING),
            0x8000_0000 if amd => entry.eax = entry.eax.max(amd::TOPOLOGY),
            _ => {}
        }
    }
    let leaf_1f = entries.iter().any(|e| e.function == 0 && e.eax >= 0x1f);
    for leaf in [Some(0xb), leaf_1f.then_some(0x1f)].into_iter().flatten() {
        entries.extend(extended_topology(leaf, topology, apic_id));
    }
    if amd {
        entries.push(amd::topology(topology, apic_id));
    }
    if timing.tsc_khz != 0 {
        let (eax, ebx) = (timing.tsc_khz, APIC_BUS_KHZ);
        entries.push(kvm_cpuid_entry2 {
            function: KVM_TIMING,
            eax,
            ebx,
            ..Default::default()
        });
    }
    entries
}

fn apply_topology(entry: &mut kvm_cpuid_entry2, topology: Topology, apic_id: u32, amd: bool) {
    let per_package = topology.threads_per_package();
    // Guests derive the sharing of caches from ranges of APIC ids, unused ids included.
    let (core_ids, package_ids) = (1 << topology.core_shift(), 1 << topology.package_shift());
    let sharing = |eax: u32| if eax >> 5 & 7 >= 3 { package_ids } else { core_ids };
    match (entry.function, amd) {
        (0x1, _) => {
            // AMD counts threads here, Intel the APIC ids reserved for them.
            let count = if amd { per_package } else { package_ids.min(255) };
            field(&mut entry.ebx, 16, 8, count);
            field(&mut entry.ebx, 24, 8, apic_id);
            field(&mut entry.edx, 28, 1, u32::from(per_package > 1)); // HTT
        }
        // Deterministic cache parameters: the ids that share the cache, and the core ids of a package.
        (0x4, false) if entry.eax & 0x1f != 0 => {
            let ids = sharing(entry.eax);
            field(&mut entry.eax, 14, 12, ids - 1);
            field(&mut entry.eax, 26, 6, (1 << bits(topology.cores)) - 1);
        }
        (amd::CACHES, true) if entry.eax & 0x1f != 0 => {
            let ids = sharing(entry.eax);
            field(&mut entry.eax, 14, 12, ids - 1);
        }
        (0x8000_0001, true) => {
            field(&mut entry.ecx, 1, 1, u32::from(per_package > 1)); // CmpLegacy
            field(&mut entry.ecx, 22, 1, 1); // TopologyExtensions
        }
        (0x8000_0008, true) => {
            field(&mut entry.ecx, 0, 8, per_package - 1);
            field(&mut entry.ecx, 12, 4, topology.package_shift());
        }
        _ => {}
    }
}

/// Leaf 0xB or 0x1F: SMT level, core level, terminating level.
fn extended_topology(leaf: u32, topology: Topology, apic_id: u32) -> [kvm_cpuid_entry2; 3] {
    let level = |index, shift, count, kind: u32| kvm_cpuid_entry2 {
        function: leaf,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: kind << 8 | index,
        edx: apic_id,
        ..Default::default()
    };
    [
        level(0, topology.core_shift(), topology.threads, 1),
        level(1, topology.package_shift(), topology.threads_per_package(), 2),
        level(2, 0, 0, 0),
    ]
}

/// Address bits that four levels of page tables translate.
const FOUR_LEVELS: u32 = 48;

/// Guest-physical address bits: the host's MAXPHYADDR, limited to what its page tables for guests translate. KVM
/// reports that limit in GuestPhysAddrSize since Linux 6.10; without it, four levels are assumed.
pub fn physical_address_bits(supported: &CpuId) -> u8 {
    let leaf = supported.as_slice().iter().find(|e| e.function == 0x8000_0008);
    leaf.map_or(36, |e| {
        let (host, guest) = (e.eax & 0xff, e.eax >> 16 & 0xff);
        host.min(if guest == 0 { FOUR_LEVELS } else { guest }) as u8
    })
}

#[cfg(test)]
mod tests;
