//! The host's KVM: what Husk needs of it, and a VM with its in-kernel devices.

use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, MsrList};
use kvm_ioctls::{Cap, Kvm, VmFd};

use crate::layout;

/// What KVM lacks, or refused.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// A capability is missing.
    #[error("/dev/kvm lacks {0}; a newer host kernel is needed")]
    Missing(&'static str),
    /// Not KVM, or a KVM that never was.
    #[error("the descriptor given as /dev/kvm speaks KVM API version {0}, not 12")]
    Version(i32),
    /// An ioctl failed.
    #[error("KVM {operation}: {source}")]
    Ioctl {
        /// What was tried.
        operation: &'static str,
        /// The cause.
        source: kvm_ioctls::Error,
    },
}

/// Names the operation of a failed ioctl.
pub fn failed(operation: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> KvmError {
    move |source| KvmError::Ioctl { operation, source }
}

/// The host's KVM and what it offers every VM.
#[derive(Debug)]
pub struct KvmHost {
    kvm: Kvm,
    /// CPUID as KVM can provide it.
    pub cpuid: CpuId,
    /// MSRs whose state KVM keeps.
    pub msrs: MsrList,
}

impl KvmHost {
    /// Checks that `fd`, an open /dev/kvm, has all that is needed.
    pub fn new(fd: OwnedFd) -> Result<Self, KvmError> {
        // SAFETY: the descriptor is ours, and everything done with it goes through KVM ioctls, which a file
        // that is not /dev/kvm answers with ENOTTY: the version check below.
        let kvm = unsafe { <Kvm as std::os::fd::FromRawFd>::from_raw_fd(fd.into_raw_fd()) };
        match kvm.get_api_version() {
            12 => {}
            version => return Err(KvmError::Version(version)),
        }
        for (cap, name) in [
            (Cap::Irqchip, "an in-kernel irqchip"),
            (Cap::Irqfd, "irqfd"),
            (Cap::Ioeventfd, "ioeventfd"),
            (Cap::UserMemory, "user memory slots"),
            (Cap::ImmediateExit, "immediate_exit"),
            (Cap::SetTssAddr, "a TSS address"),
            (Cap::AdjustClock, "clock adjustment"),
            (Cap::MpState, "MP state"),
            (Cap::Xsave, "XSAVE state"),
            (Cap::Xcrs, "XCR state"),
            (Cap::VcpuEvents, "vCPU event state"),
            (Cap::Debugregs, "debug register state"),
        ] {
            if !kvm.check_extension(cap) {
                return Err(KvmError::Missing(name));
            }
        }
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(failed("supported CPUID"))?;
        let msrs = kvm.get_msr_index_list().map_err(failed("MSR list"))?;
        Ok(Self { kvm, cpuid, msrs })
    }

    /// Most vCPUs a VM may have.
    pub fn max_vcpus(&self) -> u32 {
        u32::try_from(self.kvm.get_max_vcpus()).unwrap_or(u32::MAX)
    }

    /// Whether local APIC timers can run in TSC-deadline mode.
    pub fn tsc_deadline(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }

    /// A VM with irqchip, but without memory or vCPUs.
    pub fn create_vm(&self) -> Result<Arc<VmFd>, KvmError> {
        let vm = self.kvm.create_vm().map_err(failed("create VM"))?;
        vm.set_identity_map_address(layout::IDENTITY_MAP)
            .map_err(failed("identity map address"))?;
        vm.set_tss_address(layout::TSS as usize)
            .map_err(failed("TSS address"))?;
        vm.create_irq_chip().map_err(failed("create irqchip"))?;
        Ok(Arc::new(vm))
    }
}
