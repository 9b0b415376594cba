//! The time-stamp counter of a vCPU, and its offset to the host's.

use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_device_attr};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

use super::msrs::{self, SavedMsr};
use crate::kvm::{KvmError, failed};

// kvm-ioctls has these for a vCPU of other architectures only.
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);

/// A vCPU's TSC at a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedTsc {
    /// Frequency in kHz, 0 if KVM does not know it.
    pub khz: u32,
    /// The guest's TSC.
    pub value: u64,
    /// KVM adds this offset to the host's TSC, or to what it has scaled that to. Another host has another TSC, so a
    /// restore uses only the differences between the vCPUs' offsets. None before Linux 5.16.
    // Without this, serde reads a missing field as None.
    #[serde(deserialize_with = "Option::deserialize")]
    pub offset: Option<u64>,
    /// KVM scales the host's TSC to this frequency before it adds the offset, because they differ.
    #[serde(skip)]
    pub scaled: bool,
}

/// A new value for a vCPU's TSC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TscTarget {
    /// A value at the time of the call.
    Value(u64),
    /// A value at the moment, seconds ago at most, when the host's TSC was `host`.
    At {
        /// The guest's TSC.
        value: u64,
        /// The host's TSC.
        host: u64,
    },
    /// An offset to the host's TSC.
    Offset(u64),
}

/// Longest time between a moment and the reading that belongs to it, in milliseconds.
const SOON: u64 = 60_000;

impl SavedTsc {
    /// The host's TSC when this one was read, unless KVM scales it by a factor that it rounds.
    fn host(&self) -> Option<u64> {
        if self.scaled {
            return None;
        }
        Some(self.value.wrapping_sub(self.offset?))
    }

    /// Cycles between two values of the host's TSC that are less than [`SOON`] apart. Others are not of one clock.
    fn cycles(&self, from: u64, to: u64) -> Option<u64> {
        let cycles = to.wrapping_sub(from);
        (cycles < u64::from(self.khz).saturating_mul(SOON)).then_some(cycles)
    }

    /// This TSC at a later moment, when the host's TSC is `host`. It stays as it was read if KVM scales it.
    pub fn at(self, host: u64) -> Self {
        let cycles = self.host().and_then(|read| self.cycles(read, host));
        Self {
            value: self.value.wrapping_add(cycles.unwrap_or(0)),
            ..self
        }
    }

    /// Cycles of this TSC in a time in nanoseconds.
    pub fn cycles_in(&self, nanoseconds: u64) -> u64 {
        let cycles = u128::from(nanoseconds) * u128::from(self.khz) / 1_000_000;
        u64::try_from(cycles).unwrap_or(0)
    }
}

fn attribute(value: *mut u64) -> kvm_device_attr {
    kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: value as u64,
    }
}

fn offset(vcpu: &VcpuFd) -> Option<u64> {
    let mut value = 0u64;
    let attribute = attribute(&raw mut value);
    // SAFETY: KVM writes the eight bytes of `value`, which outlives the call.
    let status = unsafe { ioctl_with_ref(&vcpu.as_raw_fd(), KVM_GET_DEVICE_ATTR(), &attribute) };
    (status == 0).then_some(value)
}

fn set_offset(vcpu: &VcpuFd, mut value: u64) -> Result<(), KvmError> {
    let attribute = attribute(&raw mut value);
    // SAFETY: KVM reads the eight bytes of `value`, which outlives the call.
    match unsafe { ioctl_with_ref(&vcpu.as_raw_fd(), KVM_SET_DEVICE_ATTR(), &attribute) } {
        0 => Ok(()),
        _ => Err(failed("set TSC offset")(kvm_ioctls::Error::last())),
    }
}

/// Reads the TSC of a vCPU, which KVM scales or not, as [`set_frequency`] returned.
pub fn read(vcpu: &VcpuFd, scaled: bool) -> Result<SavedTsc, KvmError> {
    let value = msrs::read_one(vcpu, msrs::TSC)?;
    Ok(SavedTsc {
        khz: vcpu.get_tsc_khz().unwrap_or(0),
        value: value.ok_or(KvmError::UnreadableMsrs(vec![msrs::TSC]))?,
        offset: offset(vcpu),
        scaled,
    })
}

/// Sets the TSC by its offset if possible. KVM takes a written value that is less than a second from the TSC for an
/// attempt to synchronize vCPUs, and keeps the TSC as it is: that TSC may be earlier than the guest's last.
fn write_value(vcpu: &VcpuFd, value: u64, scaled: bool) -> Result<(), KvmError> {
    let now = read(vcpu, scaled)?;
    match now.offset {
        Some(offset) => set_offset(vcpu, offset.wrapping_add(value.wrapping_sub(now.value))),
        None => msrs::write(
            vcpu,
            &[SavedMsr {
                index: msrs::TSC,
                value,
            }],
        ),
    }
}

/// Sets the TSC of a vCPU, and its APIC timer's deadline again: KVM converts the deadline to the host's time when it is
/// written. Returns the offset that the vCPU has then.
pub fn write(vcpu: &VcpuFd, target: TscTarget, scaled: bool) -> Result<Option<u64>, KvmError> {
    let deadline = msrs::read_one(vcpu, msrs::TSC_DEADLINE)?;
    match target {
        TscTarget::Value(value) => write_value(vcpu, value, scaled)?,
        TscTarget::At { value, host } => {
            let now = read(vcpu, scaled)?;
            match now.host().and_then(|read| now.cycles(host, read)) {
                Some(_) => set_offset(vcpu, value.wrapping_sub(host))?,
                None => write_value(vcpu, value, scaled)?,
            }
        }
        TscTarget::Offset(value) => set_offset(vcpu, value)?,
    }
    if let Some(value) = deadline.filter(|value| *value != 0) {
        let index = msrs::TSC_DEADLINE;
        msrs::write(vcpu, &[SavedMsr { index, value }])?;
    }
    Ok(offset(vcpu))
}

/// Sets the frequency of a new vCPU's TSC, in kHz, unless it has it already. True if KVM may have to scale the TSC.
pub fn set_frequency(vcpu: &VcpuFd, khz: u32) -> Result<bool, KvmError> {
    if khz == 0 || vcpu.get_tsc_khz().is_ok_and(|current| current == khz) {
        return Ok(false);
    }
    vcpu.set_tsc_khz(khz).map_err(|_| KvmError::TscFrequency(khz))?;
    Ok(true)
}

/// The value at which the first of these TSCs continues: none of them goes back. Differences between vCPUs that the
/// guest made do not count.
pub fn latest(tscs: &[SavedTsc]) -> Option<u64> {
    let first = tscs.first()?.offset;
    let in_first = |tsc: &SavedTsc| match (first, tsc.offset) {
        (Some(first), Some(own)) => tsc.value.wrapping_sub(own).wrapping_add(first),
        _ => tsc.value,
    };
    tscs.iter().map(in_first).max()
}

/// Returns the TSC to set for a vCPU that was saved with `saved`, so that it keeps its difference to the first vCPU's
/// TSC. The first vCPU was saved with `first`, and now has `value`, at `offset` from the host's TSC.
pub fn restore_target(first: SavedTsc, (value, offset): (u64, Option<u64>), saved: SavedTsc) -> TscTarget {
    match (offset, first.offset, saved.offset) {
        (Some(now), Some(first), Some(own)) => TscTarget::Offset(now.wrapping_add(own.wrapping_sub(first))),
        _ => TscTarget::Value(value),
    }
}
