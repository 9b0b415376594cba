//! IA32_ARCH_CAPABILITIES: the weaknesses that a processor does not have, and the means against others. It continues
//! CPUID in an MSR, whose value KVM takes without a check. On processors of AMD too KVM shows it.

use kvm_bindings::kvm_cpuid_entry2;

use super::check::CpuMismatch;
use super::{CpuidBit, Register};

/// The MSR.
pub const ARCH_CAPABILITIES: u32 = 0x10a;

/// CPUID shows guests that there is the MSR.
const SHOWN: CpuidBit = CpuidBit(0x7, 0, Register::Edx, 29);

/// Names of the bits, as in Intel's SDM volume 4, table 2-2.
const NAMES: &[(u32, &str)] = &[
    (0, "RDCL_NO"),
    (1, "IBRS_ALL"),
    (2, "RSBA"),
    (4, "SSB_NO"),
    (5, "MDS_NO"),
    (6, "IF_PSCHANGE_MC_NO"),
    (7, "TSX_CTRL"),
    (8, "TAA_NO"),
    (13, "SBDR_SSDP_NO"),
    (14, "FBSDP_NO"),
    (15, "PSDP_NO"),
    (17, "FB_CLEAR"),
    (18, "FB_CLEAR_CTRL"),
    (19, "RRSBA"),
    (20, "BHI_NO"),
    (24, "PBRSB_NO"),
    (26, "GDS_NO"),
    (27, "RFDS_NO"),
    (28, "RFDS_CLEAR"),
    (62, "ITS_NO"),
];

/// RSBA and RRSBA: the processor has a weakness if the bit is set. A guest must have seen it.
const WEAKNESSES: u64 = 1 << 2 | 1 << 19;
/// SKIP_L1DFL_VMENTRY is for hypervisors, which need VMX.
const FOR_HYPERVISORS: u64 = 1 << 3;

fn name(bit: u32) -> String {
    let found = NAMES.iter().find(|(named, _)| *named == bit);
    found.map_or_else(
        || format!("IA32_ARCH_CAPABILITIES bit {bit}"),
        |(_, name)| (*name).to_owned(),
    )
}

/// Checks the value `saved` of the MSR, which a guest with the CPUID `cpuid` has seen, against that of this host's KVM.
///
/// # Errors
/// Names all bits that the host lacks, and those of weaknesses that the guest has not seen.
pub fn check_arch_capabilities(
    cpuid: &[kvm_cpuid_entry2],
    saved: u64,
    offered: u64,
) -> Result<(), CpuMismatch> {
    let lost = saved & !offered & !(WEAKNESSES | FOR_HYPERVISORS);
    let new = offered & !saved & WEAKNESSES;
    let lacking = lost | new;
    if lacking == 0 || !SHOWN.is_set(cpuid) {
        return Ok(());
    }
    let bits = (0..64).filter(|bit| lacking >> bit & 1 == 1);
    Err(CpuMismatch::Features(bits.map(name).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown() -> [kvm_cpuid_entry2; 1] {
        [kvm_cpuid_entry2 {
            function: 0x7,
            edx: 1 << 29,
            ..Default::default()
        }]
    }

    #[test]
    fn what_the_host_lacks_is_named() {
        let check = |saved, offered| check_arch_capabilities(&shown(), saved, offered);
        assert_eq!(check(0x61, 0x400_0000_0061), Ok(()));
        let missing = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned());
            Err(CpuMismatch::Features(names.collect()))
        };
        assert_eq!(check(0x61, 0x40), missing(&["RDCL_NO", "MDS_NO"]));
        let unknown = "IA32_ARCH_CAPABILITIES bit 63";
        assert_eq!(check(1 << 62 | 1 << 63, 0), missing(&["ITS_NO", unknown]));
        assert_eq!(check(0, WEAKNESSES), missing(&["RSBA", "RRSBA"]));
    }

    #[test]
    fn a_guest_that_cannot_miss_a_bit_goes_on() {
        assert_eq!(
            check_arch_capabilities(&shown(), WEAKNESSES | FOR_HYPERVISORS, 0),
            Ok(())
        );
        assert_eq!(check_arch_capabilities(&[], u64::MAX, 0), Ok(()));
    }
}
