//! Reading and writing MSRs: each one that KVM lists, or an error with its number.

use std::ops::RangeInclusive;

use kvm_bindings::{Msrs, kvm_cpuid_entry2, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use super::hidden;
use crate::kvm::{KvmError, failed};

/// Time-stamp counter. Not among the saved MSRs: [`super::tsc`].
pub(super) const TSC: u32 = 0x10;
/// Deadline of the local APIC's timer. Not among the saved MSRs, because it comes after the local APIC.
pub(super) const TSC_DEADLINE: u32 = 0x6e0;
/// Memory type of what no range register describes.
pub(super) const MTRR_DEF_TYPE: u32 = 0x2ff;
/// Miscellaneous features.
pub(super) const MISC_ENABLE: u32 = 0x1a0;

/// Debug control; Linux has it trap bus locks.
const DEBUG_CONTROL: u32 = 0x1d9;

/// Maximum number of MSRs in one ioctl.
const BATCH: usize = 256;

/// MSRs that guests write and KVM does not list: debug control, which some versions list, MTRRs and the banks of machine
/// checks.
const UNLISTED: [RangeInclusive<u32>; 7] = [
    DEBUG_CONTROL..=DEBUG_CONTROL,
    0x200..=0x20f,
    0x250..=0x250,
    0x258..=0x259,
    0x268..=0x26f,
    MTRR_DEF_TYPE..=MTRR_DEF_TYPE,
    0x400..=0x47f,
];

/// Listed MSRs that are not saved, with the reason.
const NOT_SAVED: [(RangeInclusive<u32>, &str); 4] = [
    (TSC..=TSC, "saved with its offset"),
    (TSC_DEADLINE..=TSC_DEADLINE, "saved by itself"),
    (
        0x480..=0x491,
        "VMX capabilities: constants of KVM, and VMX is withheld",
    ),
    (
        0x4000_0000..=0x4000_01ff,
        "Hyper-V: without its CPUID leaves no guest reaches them, and KVM allocates memory for an access",
    ),
];

/// An MSR and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedMsr {
    /// Number.
    pub index: u32,
    /// Value.
    pub value: u64,
}

impl From<SavedMsr> for kvm_msr_entry {
    fn from(msr: SavedMsr) -> Self {
        let SavedMsr { index, value: data } = msr;
        Self {
            index,
            data,
            ..Default::default()
        }
    }
}

/// The MSRs to save, of those that KVM lists.
pub(super) fn to_save(listed: &[u32]) -> Vec<u32> {
    let excluded = |index: &u32| NOT_SAVED.iter().any(|(range, _)| range.contains(index));
    let mut indices: Vec<u32> = listed.iter().copied().filter(|index| !excluded(index)).collect();
    indices.extend(UNLISTED.into_iter().flatten());
    indices.sort_unstable();
    indices.dedup();
    indices
}

fn batch(entries: &[kvm_msr_entry]) -> Result<Msrs, KvmError> {
    Msrs::from_entries(entries).map_err(|_| KvmError::TooManyMsrs(entries.len()))
}

/// Reads `indices`. The second list has those that KVM refuses to read.
fn read_each(vcpu: &VcpuFd, indices: &[u32]) -> Result<(Vec<SavedMsr>, Vec<u32>), KvmError> {
    let (mut found, mut refused) = (Vec::with_capacity(indices.len()), Vec::new());
    let mut rest = indices;
    while !rest.is_empty() {
        let asked = &rest[..rest.len().min(BATCH)];
        let entries: Vec<_> = asked
            .iter()
            .map(|&index| SavedMsr { index, value: 0 }.into())
            .collect();
        let mut msrs = batch(&entries)?;
        // KVM stops at the first MSR that it cannot read.
        let read = vcpu
            .get_msrs(&mut msrs)
            .map_err(failed("read MSRs"))?
            .min(asked.len());
        found.extend(msrs.as_slice()[..read].iter().map(|entry| SavedMsr {
            index: entry.index,
            value: entry.data,
        }));
        refused.extend(asked.get(read));
        rest = rest
            .get(read + usize::from(read < asked.len())..)
            .unwrap_or_default();
    }
    Ok((found, refused))
}

/// Reads one MSR, or None if this vCPU does not have it.
pub(super) fn read_one(vcpu: &VcpuFd, index: u32) -> Result<Option<u64>, KvmError> {
    Ok(read_each(vcpu, &[index])?.0.first().map(|msr| msr.value))
}

/// Reads the MSRs of a vCPU with the CPUID `cpuid`.
///
/// # Errors
/// Names the MSRs that KVM does not read, except those of features that `cpuid` hides from the guest.
pub(super) fn read(
    vcpu: &VcpuFd,
    indices: &[u32],
    cpuid: &[kvm_cpuid_entry2],
) -> Result<Vec<SavedMsr>, KvmError> {
    let (found, refused) = read_each(vcpu, indices)?;
    let missing: Vec<u32> = refused
        .into_iter()
        .filter(|&index| !hidden::from_guest(index, cpuid))
        .collect();
    if missing.is_empty() {
        Ok(found)
    } else {
        Err(KvmError::UnreadableMsrs(missing))
    }
}

/// Reads those of `indices` that KVM reads.
pub(super) fn read_readable(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<SavedMsr>, KvmError> {
    Ok(read_each(vcpu, indices)?.0)
}

/// Writes MSRs in the order given.
///
/// # Errors
/// Names the first MSR that KVM refuses to write and that has another value: some are constants of a vCPU.
pub(super) fn write(vcpu: &VcpuFd, msrs: &[SavedMsr]) -> Result<(), KvmError> {
    match write_each(vcpu, msrs)?.first() {
        Some(&SavedMsr { index, value }) => Err(KvmError::UnwritableMsr { index, value }),
        None => Ok(()),
    }
}

/// Writes MSRs in the order given. Returns those that KVM refuses to write and that have another value.
pub(super) fn write_each(vcpu: &VcpuFd, msrs: &[SavedMsr]) -> Result<Vec<SavedMsr>, KvmError> {
    let (mut rest, mut refused) = (msrs, Vec::new());
    while !rest.is_empty() {
        let wanted = &rest[..rest.len().min(BATCH)];
        let entries: Vec<_> = wanted.iter().copied().map(Into::into).collect();
        let written = vcpu
            .set_msrs(&batch(&entries)?)
            .map_err(failed("write MSRs"))?
            .min(wanted.len());
        rest = &rest[written..];
        if let Some(&SavedMsr { index, value }) = wanted.get(written) {
            if read_one(vcpu, index)? != Some(value) {
                refused.push(SavedMsr { index, value });
            }
            rest = &rest[1..];
        }
    }
    Ok(refused)
}
