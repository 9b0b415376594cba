//! Pausing and continuing all vCPUs of a machine together.

use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use super::state::tsc::{self, SavedTsc, TscTarget};
use super::{Vcpu, VcpuError};
use crate::kvm::KvmError;
use crate::vm_state::ClockMoment;

/// Pauses every vCPU and waits until all are out of the guest, for `timeout` at most. Returns their TSCs.
///
/// # Errors
/// If one vCPU fails or does not answer in time, all of them are resumed.
pub fn pause_all(vcpus: &[Vcpu], timeout: Duration) -> Result<Vec<SavedTsc>, VcpuError> {
    let paused = try_pause_all(vcpus, Instant::now() + timeout);
    if paused.is_err() {
        resume_all(vcpus);
    }
    paused
}

fn try_pause_all(vcpus: &[Vcpu], deadline: Instant) -> Result<Vec<SavedTsc>, VcpuError> {
    let pending = vcpus.iter().map(Vcpu::pause).collect::<Result<Vec<_>, _>>()?;
    pending.into_iter().map(|vcpu| vcpu.wait(deadline)).collect()
}

/// Resumes every vCPU after a pause that failed. A vCPU that was late handles this command after the one to pause. A
/// vCPU whose thread has ended has reported that itself.
pub fn resume_all(vcpus: &[Vcpu]) {
    for vcpu in vcpus {
        let _ = vcpu.run();
    }
}

/// Sets the TSCs of paused vCPUs to those that they had at a pause: they go on from the latest value, with the
/// differences that the guest made between them. At the moment `since`, kvmclock had gone on for some time.
pub fn set_tscs(vcpus: &[Vcpu], saved: &[SavedTsc], since: Option<ClockMoment>) -> Result<(), VcpuError> {
    let (Some(value), [first, others @ ..], [first_saved, others_saved @ ..]) =
        (tsc::latest(saved), vcpus, saved)
    else {
        return Ok(());
    };
    let target = match since {
        Some(ClockMoment { elapsed, host_tsc }) => TscTarget::At {
            value: value.wrapping_add(first_saved.cycles_in(elapsed)),
            host: host_tsc,
        },
        None => TscTarget::Value(value),
    };
    let offset = first.set_tsc(target)?;
    for (vcpu, saved) in others.iter().zip(others_saved) {
        vcpu.set_tsc(tsc::restore_target(*first_saved, (value, offset), *saved))?;
    }
    Ok(())
}

/// A pause that a vCPU has been sent.
#[derive(Debug)]
pub(super) struct PendingPause {
    pub(super) index: u32,
    pub(super) answer: Receiver<Result<SavedTsc, KvmError>>,
}

impl PendingPause {
    /// Waits until the vCPU is out of the guest; returns its TSC.
    fn wait(self, deadline: Instant) -> Result<SavedTsc, VcpuError> {
        let index = self.index;
        self.answer
            .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            .map_err(|_| VcpuError::Unresponsive(index))?
            .map_err(|source| VcpuError::Kvm { index, source })
    }
}
