//! A vCPU as it is saved: its CPUID and its state.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use super::state::VcpuState;
use crate::cpuid::ARCH_CAPABILITIES;
use crate::kvm::KvmError;

/// One CPUID leaf and subleaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedCpuidEntry {
    function: u32,
    index: u32,
    flags: u32,
    eax: u32,
    ebx: u32,
    ecx: u32,
    edx: u32,
}

impl From<&kvm_cpuid_entry2> for SavedCpuidEntry {
    fn from(entry: &kvm_cpuid_entry2) -> Self {
        let &kvm_cpuid_entry2 {
            function,
            index,
            flags,
            eax,
            ebx,
            ecx,
            edx,
            ..
        } = entry;
        Self {
            function,
            index,
            flags,
            eax,
            ebx,
            ecx,
            edx,
        }
    }
}

impl From<&SavedCpuidEntry> for kvm_cpuid_entry2 {
    fn from(entry: &SavedCpuidEntry) -> Self {
        let &SavedCpuidEntry {
            function,
            index,
            flags,
            eax,
            ebx,
            ecx,
            edx,
        } = entry;
        Self {
            function,
            index,
            flags,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }
}

/// CPUID and state of a paused vCPU. Its TSC is part of [`crate::vm_state::SavedClock`].
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedVcpu {
    cpuid: Vec<SavedCpuidEntry>,
    state: VcpuState,
}

impl SavedVcpu {
    /// Reads the state of a vCPU with the CPUID `cpuid`. `listed` are the MSRs that KVM lists.
    pub(super) fn capture(vcpu: &VcpuFd, cpuid: &CpuId, listed: &[u32]) -> Result<Self, KvmError> {
        Ok(Self {
            cpuid: cpuid.as_slice().iter().map(Into::into).collect(),
            state: VcpuState::capture(vcpu, listed, cpuid.as_slice())?,
        })
    }

    /// The CPUID with which the vCPU has to be created again.
    pub fn cpuid(&self) -> Vec<kvm_cpuid_entry2> {
        self.cpuid.iter().map(Into::into).collect()
    }

    /// IA32_ARCH_CAPABILITIES, which the guest has seen.
    pub fn arch_capabilities(&self) -> u64 {
        self.state.msr_bits(ARCH_CAPABILITIES)
    }

    /// Writes the state to a vCPU that was created with [`Self::cpuid`].
    pub(super) fn restore(&self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        self.state.restore(vcpu)
    }
}

#[cfg(test)]
mod tests;
