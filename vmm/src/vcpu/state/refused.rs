//! Features that guests do not have and whose state is not saved.

use kvm_bindings::{kvm_sregs, kvm_xcrs};

use crate::kvm::KvmError;

const CR4_VMXE: u64 = 1 << 13;
const EFER_SVME: u64 = 1 << 12;
/// XTILECFG and XTILEDATA.
const XCR0_AMX: u64 = 3 << 17;

/// Names the feature of which a vCPU has state that is not saved. CPUID hides all of them from guests.
pub(super) fn check(sregs: &kvm_sregs, xcrs: &kvm_xcrs) -> Result<(), KvmError> {
    let used = if sregs.cr4 & CR4_VMXE != 0 {
        "VMX"
    } else if sregs.efer & EFER_SVME != 0 {
        "SVM"
    } else if xcrs
        .xcrs
        .iter()
        .any(|xcr| xcr.xcr == 0 && xcr.value & XCR0_AMX != 0)
    {
        "AMX"
    } else {
        return Ok(());
    };
    Err(KvmError::UnsavedFeature(used))
}
