//! One bit of a CPUID register.

use kvm_bindings::kvm_cpuid_entry2;

/// A register of a CPUID leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Register {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

impl Register {
    /// The register's value in `entry`.
    pub fn of(self, entry: &kvm_cpuid_entry2) -> u32 {
        match self {
            Self::Eax => entry.eax,
            Self::Ebx => entry.ebx,
            Self::Ecx => entry.ecx,
            Self::Edx => entry.edx,
        }
    }
}

/// Leaf, subleaf, register, bit number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuidBit(pub u32, pub u32, pub Register, pub u32);

impl CpuidBit {
    /// True if `entries` have the bit.
    pub fn is_set(self, entries: &[kvm_cpuid_entry2]) -> bool {
        let Self(leaf, subleaf, register, bit) = self;
        entries
            .iter()
            .any(|e| (e.function, e.index) == (leaf, subleaf) && register.of(e) >> bit & 1 == 1)
    }
}
