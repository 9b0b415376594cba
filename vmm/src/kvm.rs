//! The host's KVM: checks its capabilities and creates VMs with an in-kernel irqchip.

use std::os::fd::{IntoRawFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, MsrList, Msrs, kvm_msr_entry};
use kvm_ioctls::{Cap, Kvm, VmFd};

use crate::cpuid::{ARCH_CAPABILITIES, CpuMismatch};
use crate::layout;

/// Errors of KVM.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// A capability is missing.
    #[error("/dev/kvm lacks {0}; a newer host kernel is needed")]
    Missing(&'static str),
    /// The descriptor reports another KVM API version.
    #[error("the descriptor given as /dev/kvm has KVM API version {0}, not 12")]
    Version(i32),
    /// The CPUID of a vCPU has more entries than KVM takes.
    #[error("too many CPUID entries for KVM")]
    CpuidEntries,
    /// Guest memory does not hold the structures of the boot protocol.
    #[error("guest memory is too small for the boot structures")]
    NoBootMemory,
    /// More MSRs than one ioctl takes.
    #[error("{0} MSRs are too many for one call of KVM")]
    TooManyMsrs(usize),
    /// KVM lists MSRs that it does not read, so that a vCPU's state would be incomplete.
    #[error("KVM lists MSRs that it cannot read: {}", hexadecimal(.0))]
    UnreadableMsrs(Vec<u32>),
    /// KVM does not write an MSR.
    #[error("KVM refuses the value {value:#x} of MSR {index:#x}")]
    UnwritableMsr {
        /// Number of the MSR.
        index: u32,
        /// The refused value.
        value: u64,
    },
    /// The vCPU uses a feature whose state cannot be saved.
    #[error("the vCPU uses {0}, whose state cannot be saved or restored")]
    UnsavedFeature(&'static str),
    /// This host cannot run a saved vCPU.
    #[error(transparent)]
    Cpu(#[from] CpuMismatch),
    /// The saved TSC frequency, in kHz, which the host's KVM cannot provide.
    #[error("the host cannot provide the guest's TSC frequency of {0} kHz")]
    TscFrequency(u32),
    /// An ioctl failed.
    #[error("KVM {operation}: {source}")]
    Ioctl {
        /// Name of the operation.
        operation: &'static str,
        /// The cause.
        source: kvm_ioctls::Error,
    },
}

fn hexadecimal(numbers: &[u32]) -> String {
    let texts: Vec<_> = numbers.iter().map(|n| format!("{n:#x}")).collect();
    texts.join(", ")
}

/// Returns a conversion that adds the operation to an ioctl's error.
pub fn failed(operation: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> KvmError {
    move |source| KvmError::Ioctl { operation, source }
}

/// The value of an MSR that describes features of the host, 0 if KVM does not have it.
fn feature_msr(kvm: &Kvm, index: u32) -> u64 {
    let entry = kvm_msr_entry {
        index,
        ..Default::default()
    };
    let Ok(mut msrs) = Msrs::from_entries(&[entry]) else {
        return 0;
    };
    match kvm.get_msrs(&mut msrs) {
        Ok(1) => msrs.as_slice()[0].data,
        _ => 0,
    }
}

/// The host's KVM, and the features it supports for every VM.
#[derive(Debug)]
pub struct KvmHost {
    kvm: Kvm,
    /// Supported CPUID entries.
    pub cpuid: CpuId,
    /// MSRs that KVM saves and restores.
    pub msrs: MsrList,
    /// IA32_ARCH_CAPABILITIES of a new vCPU, 0 if KVM does not have it.
    pub arch_capabilities: u64,
}

impl KvmHost {
    /// Checks that `fd`, an open /dev/kvm, has the required capabilities.
    pub fn new(fd: OwnedFd) -> Result<Self, KvmError> {
        // SAFETY: this function owns the descriptor, and only KVM ioctls use it. A file other than /dev/kvm fails the
        // version check below with ENOTTY.
        let kvm = unsafe { <Kvm as std::os::fd::FromRawFd>::from_raw_fd(fd.into_raw_fd()) };
        match kvm.get_api_version() {
            12 => {}
            version => return Err(KvmError::Version(version)),
        }
        for (cap, name) in [
            (Cap::Irqchip, "an in-kernel irqchip"),
            (Cap::Irqfd, "irqfd"),
            (Cap::Ioeventfd, "ioeventfd"),
            (Cap::CoalescedPio, "coalesced port writes"),
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
        let arch_capabilities = feature_msr(&kvm, ARCH_CAPABILITIES);
        Ok(Self {
            kvm,
            cpuid,
            msrs,
            arch_capabilities,
        })
    }

    /// Maximum number of vCPUs of a VM.
    pub fn max_vcpus(&self) -> u32 {
        u32::try_from(self.kvm.get_max_vcpus()).unwrap_or(u32::MAX)
    }

    /// True if local APIC timers support TSC-deadline mode.
    pub fn tsc_deadline(&self) -> bool {
        self.kvm.check_extension(Cap::TscDeadlineTimer)
    }

    /// Creates a VM with an irqchip, without memory and vCPUs.
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
