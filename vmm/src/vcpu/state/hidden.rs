//! MSRs that KVM lists by what the host has, and reads only if the guest's CPUID shows their feature.

use std::ops::RangeInclusive;

use kvm_bindings::kvm_cpuid_entry2;

use crate::cpuid::{CpuidBit, Register};

/// MSRs, and the features of which one makes them accessible. No feature: it is always withheld.
const FEATURES: &[(RangeInclusive<u32>, &[CpuidBit])] = &[
    // FEATURE_CONTROL: locks VMX and SGX.
    (0x3a..=0x3a, &[]),
    // SPEC_CTRL: IBRS, STIBP, SSBD, under Intel's and AMD's numbers.
    (
        0x48..=0x48,
        &[
            CpuidBit(0x7, 0, Register::Edx, 26),
            CpuidBit(0x7, 0, Register::Edx, 27),
            CpuidBit(0x7, 0, Register::Edx, 31),
            CpuidBit(0x8000_0008, 0, Register::Ebx, 14),
            CpuidBit(0x8000_0008, 0, Register::Ebx, 15),
            CpuidBit(0x8000_0008, 0, Register::Ebx, 24),
        ],
    ),
    // Performance counters: PMCs and event selectors, PERF_CAPABILITIES, fixed and global counters, PEBS and DS.
    (0xc1..=0xc8, &[]),
    (0x186..=0x18d, &[]),
    (0x309..=0x30c, &[]),
    (0x345..=0x345, &[]),
    (0x38d..=0x391, &[]),
    (0x3f1..=0x3f2, &[]),
    (0x4c1..=0x4c8, &[]),
    (0x600..=0x600, &[]),
    (0xc000_0300..=0xc000_0303, &[]),
    // AMD's counters beyond the four that every AMD processor has.
    (0xc001_0200..=0xc001_020b, &[]),
    // UMWAIT_CONTROL.
    (0xe1..=0xe1, &[CpuidBit(0x7, 0, Register::Ecx, 5)]),
    // ARCH_CAPABILITIES, and TSX_CTRL, which it announces.
    (0x10a..=0x10a, &[CpuidBit(0x7, 0, Register::Edx, 29)]),
    (0x122..=0x122, &[CpuidBit(0x7, 0, Register::Edx, 29)]),
    // Machine checks and MTRRs.
    (0x400..=0x47f, &[CpuidBit(0x1, 0, Register::Edx, 14)]),
    (0x200..=0x2ff, &[CpuidBit(0x1, 0, Register::Edx, 12)]),
    // XFD, XFD_ERR and XSS.
    (0x1c4..=0x1c5, &[CpuidBit(0xd, 1, Register::Eax, 4)]),
    (0xda0..=0xda0, &[CpuidBit(0xd, 1, Register::Eax, 3)]),
    // FRED.
    (0x1cc..=0x1d4, &[CpuidBit(0x7, 1, Register::Eax, 17)]),
    // Processor trace.
    (0x560..=0x587, &[CpuidBit(0x7, 0, Register::Ebx, 25)]),
    // U_CET and S_CET; shadow stack pointers.
    (
        0x6a0..=0x6a2,
        &[
            CpuidBit(0x7, 0, Register::Ecx, 7),
            CpuidBit(0x7, 0, Register::Edx, 20),
        ],
    ),
    (0x6a4..=0x6a8, &[CpuidBit(0x7, 0, Register::Ecx, 7)]),
    // BNDCFGS.
    (0xd90..=0xd90, &[CpuidBit(0x7, 0, Register::Ebx, 14)]),
    // TSC_AUX.
    (
        0xc000_0103..=0xc000_0103,
        &[
            CpuidBit(0x8000_0001, 0, Register::Edx, 27),
            CpuidBit(0x7, 0, Register::Ecx, 22),
        ],
    ),
    // TSC_RATIO and VM_HSAVE_PA of SVM.
    (0xc000_0104..=0xc000_0104, &[]),
    (0xc001_0117..=0xc001_0117, &[]),
];

/// True if a guest with this CPUID has none of the features to which the MSR belongs.
pub(super) fn from_guest(msr: u32, cpuid: &[kvm_cpuid_entry2]) -> bool {
    FEATURES
        .iter()
        .any(|(range, features)| range.contains(&msr) && !features.iter().any(|bit| bit.is_set(cpuid)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_msr_is_excused_only_while_its_feature_is_hidden() {
        let rdtscp = kvm_cpuid_entry2 {
            function: 0x8000_0001,
            edx: 1 << 27,
            ..Default::default()
        };
        assert!(from_guest(0xc000_0103, &[]));
        assert!(!from_guest(0xc000_0103, &[rdtscp]));
        assert!(from_guest(0xc1, &[rdtscp]), "performance counters are withheld");
        // STAR belongs to no feature.
        assert!(!from_guest(0xc000_0081, &[]));
    }
}
