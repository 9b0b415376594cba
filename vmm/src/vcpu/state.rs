//! A vCPU's architectural state, captured when the vCPU is new and restored by a reset.

use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;

use crate::kvm::{KvmError, failed};

const MSR_IA32_TSC: u32 = 0x10;
const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;

const MISC_ENABLE_FAST_STRING: u64 = 1;
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// Maximum number of MSRs in one ioctl.
const MSR_BATCH: usize = 256;

/// The state of a vCPU that a reset restores.
pub struct VcpuState {
    regs: kvm_regs,
    sregs: kvm_sregs,
    lapic: kvm_lapic_state,
    mp_state: kvm_mp_state,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    events: kvm_vcpu_events,
    debug: kvm_debugregs,
    msrs: Vec<kvm_msr_entry>,
}

impl std::fmt::Debug for VcpuState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VcpuState")
            .field("msrs", &self.msrs.len())
            .finish_non_exhaustive()
    }
}

fn batch(entries: &[kvm_msr_entry]) -> Option<Msrs> {
    Msrs::from_entries(entries).ok()
}

/// Reads those of `indices` that this vCPU has.
fn read_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Vec<kvm_msr_entry> {
    let mut found = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let asked = &rest[..rest.len().min(MSR_BATCH)];
        let entries: Vec<_> = asked
            .iter()
            .map(|&index| kvm_msr_entry {
                index,
                ..Default::default()
            })
            .collect();
        let Some(mut msrs) = batch(&entries) else { break };
        // KVM stops at the first MSR that it cannot read. That is no error: continue after it.
        let read = vcpu.get_msrs(&mut msrs).unwrap_or(0).min(asked.len());
        found.extend_from_slice(&msrs.as_slice()[..read]);
        rest = &rest[if read == asked.len() { read } else { read + 1 }..];
    }
    found
}

/// Writes MSRs, and skips those that KVM refuses.
fn write_msrs(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) {
    let mut rest = entries;
    while !rest.is_empty() {
        let wanted = &rest[..rest.len().min(MSR_BATCH)];
        let Some(msrs) = batch(wanted) else { break };
        let written = vcpu.set_msrs(&msrs).unwrap_or(0).min(wanted.len());
        rest = &rest[if written == wanted.len() {
            written
        } else {
            written + 1
        }..];
    }
}

impl VcpuState {
    /// Captures the state of a new vCPU whose CPUID is set. `msrs` are the indices of the MSRs that KVM saves and
    /// restores.
    pub fn capture(vcpu: &VcpuFd, msrs: &[u32]) -> Result<Self, KvmError> {
        // The TSC continues through a reset, as on a PC after a warm reset.
        let indices: Vec<u32> = msrs.iter().copied().filter(|&i| i != MSR_IA32_TSC).collect();
        let mut msrs = read_msrs(vcpu, &indices);
        for entry in &mut msrs {
            match entry.index {
                MSR_IA32_MISC_ENABLE => entry.data |= MISC_ENABLE_FAST_STRING,
                MSR_MTRR_DEF_TYPE => entry.data = MTRR_ENABLE_WRITE_BACK,
                _ => {}
            }
        }
        if !msrs.iter().any(|e| e.index == MSR_MTRR_DEF_TYPE) {
            let data = MTRR_ENABLE_WRITE_BACK;
            msrs.push(kvm_msr_entry {
                index: MSR_MTRR_DEF_TYPE,
                data,
                ..Default::default()
            });
        }
        Ok(Self {
            regs: vcpu.get_regs().map_err(failed("registers"))?,
            sregs: vcpu.get_sregs().map_err(failed("special registers"))?,
            lapic: vcpu.get_lapic().map_err(failed("local APIC"))?,
            mp_state: vcpu.get_mp_state().map_err(failed("MP state"))?,
            xsave: vcpu.get_xsave().map_err(failed("XSAVE state"))?,
            xcrs: vcpu.get_xcrs().map_err(failed("XCRs"))?,
            events: vcpu.get_vcpu_events().map_err(failed("vCPU events"))?,
            debug: vcpu.get_debug_regs().map_err(failed("debug registers"))?,
            msrs,
        })
    }

    /// Restores all of the state.
    pub fn restore(&self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        vcpu.set_mp_state(self.mp_state).map_err(failed("set MP state"))?;
        vcpu.set_sregs(&self.sregs)
            .map_err(failed("set special registers"))?;
        vcpu.set_regs(&self.regs).map_err(failed("set registers"))?;
        vcpu.set_xcrs(&self.xcrs).map_err(failed("set XCRs"))?;
        // SAFETY: KVM_GET_XSAVE filled the buffer, and no feature with a larger state was enabled since.
        unsafe { vcpu.set_xsave(&self.xsave) }.map_err(failed("set XSAVE state"))?;
        write_msrs(vcpu, &self.msrs);
        vcpu.set_lapic(&self.lapic).map_err(failed("set local APIC"))?;
        vcpu.set_vcpu_events(&self.events)
            .map_err(failed("set vCPU events"))?;
        vcpu.set_debug_regs(&self.debug)
            .map_err(failed("set debug registers"))
    }
}

/// Reads the guest's TSC on this vCPU.
pub fn read_tsc(vcpu: &VcpuFd) -> Option<u64> {
    read_msrs(vcpu, &[MSR_IA32_TSC]).first().map(|e| e.data)
}

/// Sets the guest's TSC on this vCPU.
pub fn write_tsc(vcpu: &VcpuFd, data: u64) {
    write_msrs(
        vcpu,
        &[kvm_msr_entry {
            index: MSR_IA32_TSC,
            data,
            ..Default::default()
        }],
    );
}
