//! A vCPU's architectural state: what a reset restores, and what is saved and restored.

use kvm_bindings::{
    kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use crate::kvm::{KvmError, failed};
use crate::kvm_struct::Base64;

mod hidden;
mod msrs;
mod refused;
pub mod tsc;

pub use msrs::SavedMsr;

const MISC_ENABLE_FAST_STRING: u64 = 1;
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// The whole state of a vCPU but its CPUID and TSC.
///
/// The page-directory pointers of PAE paging outside long mode are not in it: KVM reads them from guest memory again
/// when CR3 is restored, so memory comes first.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    mp_state: u32,
    events: Base64<kvm_vcpu_events>,
    regs: Base64<kvm_regs>,
    sregs: Base64<kvm_sregs>,
    debug: Base64<kvm_debugregs>,
    xcrs: Base64<kvm_xcrs>,
    xsave: Base64<kvm_xsave>,
    lapic: Base64<kvm_lapic_state>,
    /// Deadline of the local APIC's timer as a TSC value, 0 if it is not set. None: KVM has no such timer.
    // Without this, serde reads a missing field as None.
    #[serde(deserialize_with = "Option::deserialize")]
    tsc_deadline: Option<u64>,
    msrs: Vec<SavedMsr>,
}

impl VcpuState {
    /// Reads the state of a vCPU that runs with the CPUID `cpuid` and whose last exit is finished. `listed` are the
    /// MSRs that KVM lists.
    ///
    /// # Errors
    /// If a part cannot be read, or the vCPU uses a feature whose state is not part of this structure.
    pub fn capture(vcpu: &VcpuFd, listed: &[u32], cpuid: &[kvm_cpuid_entry2]) -> Result<Self, KvmError> {
        Self::with_msrs(vcpu, || msrs::read(vcpu, &msrs::to_save(listed), cpuid))
    }

    fn with_msrs(
        vcpu: &VcpuFd,
        read_msrs: impl FnOnce() -> Result<Vec<SavedMsr>, KvmError>,
    ) -> Result<Self, KvmError> {
        // First what changes other parts as KVM reads it: INIT and SIPI become effective with the MP state, and an
        // exception's payload goes to CR2 or DR6 with the events.
        let mp_state = vcpu.get_mp_state().map_err(failed("MP state"))?.mp_state;
        let events = vcpu.get_vcpu_events().map_err(failed("vCPU events"))?;
        let state = Self {
            mp_state,
            events: Base64(events),
            regs: Base64(vcpu.get_regs().map_err(failed("registers"))?),
            sregs: Base64(vcpu.get_sregs().map_err(failed("special registers"))?),
            debug: Base64(vcpu.get_debug_regs().map_err(failed("debug registers"))?),
            xcrs: Base64(vcpu.get_xcrs().map_err(failed("XCRs"))?),
            // Fails if the state is larger than 4096 bytes, which only permission to use AMX makes it.
            xsave: Base64(vcpu.get_xsave().map_err(failed("XSAVE state"))?),
            lapic: Base64(vcpu.get_lapic().map_err(failed("local APIC"))?),
            tsc_deadline: msrs::read_one(vcpu, msrs::TSC_DEADLINE)?,
            msrs: read_msrs()?,
        };
        state.check()?;
        Ok(state)
    }

    /// The state that [`Self::reset`] restores, read from a new vCPU whose CPUID is set. An MSR that KVM lists and does
    /// not read keeps its value in a reset; only saving needs all of them.
    pub fn power_on(vcpu: &VcpuFd, listed: &[u32]) -> Result<Self, KvmError> {
        let mut state = Self::with_msrs(vcpu, || msrs::read_readable(vcpu, &msrs::to_save(listed)))?;
        for msr in &mut state.msrs {
            match msr.index {
                msrs::MISC_ENABLE => msr.value |= MISC_ENABLE_FAST_STRING,
                msrs::MTRR_DEF_TYPE => msr.value = MTRR_ENABLE_WRITE_BACK,
                _ => {}
            }
        }
        Ok(state)
    }

    /// All bits that any saved value of an MSR has.
    pub fn msr_bits(&self, index: u32) -> u64 {
        let values = self.msrs.iter().filter(|msr| msr.index == index);
        values.fold(0, |bits, msr| bits | msr.value)
    }

    /// Refuses features whose state is not part of this structure.
    fn check(&self) -> Result<(), KvmError> {
        refused::check(&self.sregs.0, &self.xcrs.0)
    }

    /// Writes all of the state. CPUID, TSC and guest memory come before.
    ///
    /// # Errors
    /// If KVM refuses a part. The vCPU's state is undefined then.
    pub fn restore(&self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        self.write(vcpu, |msrs| msrs::write(vcpu, msrs))
    }

    /// Writes the state of [`Self::power_on`]. An MSR that KVM does not write keeps its value.
    ///
    /// # Errors
    /// If KVM refuses another part.
    pub fn reset(&self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        self.write(vcpu, |msrs| {
            let kept = msrs::write_each(vcpu, msrs)?;
            if !kept.is_empty() {
                tracing::warn!(?kept, "KVM does not write all MSRs of a reset");
            }
            Ok(())
        })
    }

    fn write(
        &self,
        vcpu: &VcpuFd,
        write_msrs: impl FnOnce(&[SavedMsr]) -> Result<(), KvmError>,
    ) -> Result<(), KvmError> {
        self.check()?;
        vcpu.set_sregs(&self.sregs.0)
            .map_err(failed("set special registers"))?;
        vcpu.set_xcrs(&self.xcrs.0).map_err(failed("set XCRs"))?;
        // SAFETY: KVM reads as much as the vCPU's features have state. That is no more than the structure, because the
        // VMM never asks for a permission that enlarges it.
        unsafe { vcpu.set_xsave(&self.xsave.0) }.map_err(failed("set XSAVE state"))?;
        // Setting registers clears a pending exception, which is one of the events.
        vcpu.set_regs(&self.regs.0).map_err(failed("set registers"))?;
        vcpu.set_debug_regs(&self.debug.0)
            .map_err(failed("set debug registers"))?;
        write_msrs(&self.msrs)?;
        // The local APIC after its base address (a special register), its timer's deadline after its mode.
        vcpu.set_lapic(&self.lapic.0).map_err(failed("set local APIC"))?;
        if let Some(value) = self.tsc_deadline {
            let index = msrs::TSC_DEADLINE;
            msrs::write(vcpu, &[SavedMsr { index, value }])?;
        }
        vcpu.set_vcpu_events(&self.events.0)
            .map_err(failed("set vCPU events"))?;
        // Last, because some parts make a vCPU runnable.
        let mp_state = self.mp_state;
        vcpu.set_mp_state(kvm_mp_state { mp_state })
            .map_err(failed("set MP state"))
    }
}

#[cfg(test)]
mod tests;
