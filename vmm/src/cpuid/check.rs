//! Checks that a host offers what a saved vCPU's CPUID promises its guest.

use kvm_bindings::kvm_cpuid_entry2;

use super::Register::{Eax, Ebx, Ecx, Edx};
use super::names::WORDS;
use super::{CpuidBit, EMPTIED, Register};

/// Bits that KVM derives from a guest's CR4, and those that the VMM writes by the topology.
const NOT_COMPARED: &[CpuidBit] = &[
    CpuidBit(0x1, 0, Ecx, 27),        // OSXSAVE
    CpuidBit(0x7, 0, Ecx, 4),         // OSPKE
    CpuidBit(0x1, 0, Edx, 28),        // HTT
    CpuidBit(0x8000_0001, 0, Ecx, 1), // CmpLegacy
];

/// Highest component of XSAVE.
const COMPONENTS: u32 = 63;

/// Reasons why a host cannot run a saved vCPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CpuMismatch {
    /// Another vendor's processor.
    #[error("the guest's processor is from {saved}, the host's from {host}")]
    Vendor {
        /// Vendor that the guest sees.
        saved: String,
        /// Vendor of the host.
        host: String,
    },
    /// Features that the host does not offer to guests.
    #[error("the host's processor or KVM does not offer the guest's {}", .0.join(", "))]
    Features(Vec<String>),
    /// The guest has more physical address bits than the host.
    #[error("the guest has {saved} physical address bits, the host's KVM offers {host}")]
    PhysicalBits {
        /// Bits that the guest sees.
        saved: u32,
        /// Bits of the host.
        host: u32,
    },
    /// The host lays out the XSAVE area in another way.
    #[error("component {0} of the XSAVE area has another size or place on the host")]
    XsaveLayout(u32),
}

fn find(entries: &[kvm_cpuid_entry2], leaf: u32, subleaf: u32) -> kvm_cpuid_entry2 {
    let mut matching = entries
        .iter()
        .filter(|e| (e.function, e.index) == (leaf, subleaf));
    matching.next().copied().unwrap_or_default()
}

/// All that any entry for this leaf has: a guest reads the first one that fits, but a second one is not ignored.
fn union(entries: &[kvm_cpuid_entry2], leaf: u32, subleaf: u32, register: Register) -> u32 {
    let matching = entries
        .iter()
        .filter(|e| (e.function, e.index) == (leaf, subleaf));
    matching.fold(0, |all, e| all | register.of(e))
}

fn is_nonzero(entry: &kvm_cpuid_entry2) -> bool {
    [entry.eax, entry.ebx, entry.ecx, entry.edx] != [0; 4]
}

fn vendor(entries: &[kvm_cpuid_entry2]) -> String {
    let leaf = find(entries, 0, 0);
    let bytes = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// MAXPHYADDR. A guest's own leaf has no field for guests in it that would lower it.
fn physical_bits(entries: &[kvm_cpuid_entry2]) -> u32 {
    match union(entries, 0x8000_0008, 0, Eax) & 0xff {
        0 => 36,
        bits => bits,
    }
}

/// Checks the CPUID `saved` of a vCPU against `offered`: what [`super::for_vcpu`] gives a new vCPU of this host.
///
/// A feature that the VMM withholds from guests is refused like one that the host lacks.
///
/// # Errors
/// Names all features that are missing, or another difference that the guest would notice.
pub fn check_saved(saved: &[kvm_cpuid_entry2], offered: &[kvm_cpuid_entry2]) -> Result<(), CpuMismatch> {
    let vendors = (vendor(saved), vendor(offered));
    if vendors.0 != vendors.1 {
        let (saved, host) = vendors;
        return Err(CpuMismatch::Vendor { saved, host });
    }
    let mut missing = Vec::new();
    for word in WORDS {
        let (leaf, subleaf, register) = (word.leaf, word.subleaf, word.register);
        let lacking =
            union(saved, leaf, subleaf, register) & !find_register(offered, leaf, subleaf, register);
        let compared = |bit: &u32| !NOT_COMPARED.contains(&CpuidBit(leaf, subleaf, register, *bit));
        let bits = (0..32).filter(|bit| lacking >> bit & 1 == 1).filter(compared);
        missing.extend(bits.map(|bit| word.name(bit)));
    }
    let is_promised = |leaf: &u32| saved.iter().any(|e| e.function == *leaf && is_nonzero(e));
    let leaves = EMPTIED.iter().map(|(leaf, _)| *leaf).filter(is_promised);
    missing.extend(leaves.map(|leaf| format!("CPUID leaf {leaf:#x}")));
    if !missing.is_empty() {
        return Err(CpuMismatch::Features(missing));
    }
    let bits = (physical_bits(saved), physical_bits(offered));
    if bits.0 > bits.1 {
        let (saved, host) = bits;
        return Err(CpuMismatch::PhysicalBits { saved, host });
    }
    check_xsave_layout(saved, offered)
}

fn find_register(entries: &[kvm_cpuid_entry2], leaf: u32, subleaf: u32, register: Register) -> u32 {
    register.of(&find(entries, leaf, subleaf))
}

/// Compares size and offset of the components in XCR0, which the guest finds in leaf 0xD.
fn check_xsave_layout(saved: &[kvm_cpuid_entry2], offered: &[kvm_cpuid_entry2]) -> Result<(), CpuMismatch> {
    let (low, high) = (union(saved, 0xd, 0, Eax), union(saved, 0xd, 0, Edx));
    let components = u64::from(high) << 32 | u64::from(low);
    let layout = |entries, component| [Eax, Ebx].map(|r| find_register(entries, 0xd, component, r));
    // The legacy area of x87 and SSE is the same everywhere.
    for component in (2..=COMPONENTS).filter(|bit| components >> bit & 1 == 1) {
        if layout(saved, component) != layout(offered, component) {
            return Err(CpuMismatch::XsaveLayout(component));
        }
    }
    Ok(())
}
