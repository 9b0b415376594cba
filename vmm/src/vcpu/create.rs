//! Creates a vCPU with the CPUID of a new machine, or with that of a saved one.

use kvm_bindings::CpuId;
use kvm_ioctls::{VcpuFd, VmFd};

use super::SavedVcpu;
use super::state::tsc::{self, SavedTsc};
use crate::cpuid::{self, HostTiming, Topology};
use crate::kvm::{KvmError, KvmHost, failed};

/// A vCPU without a thread.
#[derive(Debug)]
pub struct NewVcpu {
    /// The vCPU, with its CPUID.
    pub fd: VcpuFd,
    /// The CPUID. Saved as it was set: not every KVM returns it unchanged.
    pub cpuid: CpuId,
    /// KVM may have to scale its TSC, because the host has another frequency.
    pub tsc_scaled: bool,
}

/// Creates vCPU `index` of a machine. With `saved`, the vCPU gets the CPUID and the TSC frequency that it had when it
/// was saved; [`super::Vcpu::restore`] writes its state later.
///
/// # Errors
/// Besides failures of KVM: names what the saved vCPU has and this host does not offer.
pub fn create(
    host: &KvmHost,
    vm: &VmFd,
    topology: Topology,
    index: u32,
    saved: Option<(&SavedVcpu, &SavedTsc)>,
) -> Result<NewVcpu, KvmError> {
    // KVM takes the vCPU's id as its initial APIC id.
    let fd = vm
        .create_vcpu(u64::from(topology.apic_id(index)))
        .map_err(failed("create vCPU"))?;
    let timing = HostTiming {
        tsc_khz: fd.get_tsc_khz().unwrap_or(0),
        tsc_deadline: host.tsc_deadline(),
    };
    let mut entries = cpuid::for_vcpu(host.cpuid.as_slice(), topology, timing, index);
    let mut tsc_scaled = false;
    if let Some((saved, tsc)) = saved {
        let offered = std::mem::replace(&mut entries, saved.cpuid());
        cpuid::check_saved(&entries, &offered)?;
        cpuid::check_arch_capabilities(&entries, saved.arch_capabilities(), host.arch_capabilities)?;
        tsc_scaled = tsc::set_frequency(&fd, tsc.khz)?;
    }
    let cpuid = CpuId::from_entries(&entries).map_err(|_| KvmError::CpuidEntries)?;
    fd.set_cpuid2(&cpuid).map_err(failed("set CPUID"))?;
    Ok(NewVcpu {
        fd,
        cpuid,
        tsc_scaled,
    })
}
