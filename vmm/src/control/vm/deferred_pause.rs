//! Pauses for which no caller waits: for an I/O error, and by the watchdog.
//!
//! A vCPU that resets a device waits for the device's requests, and storage that does not answer holds them up. It
//! cannot be paused then: the VM runs on, and the pause is tried again.

use std::time::Duration;

use husk_proto::vmm::v1::{PauseReason, State};

use super::{Vm, VmExit};
use crate::machine::MachineError;
use crate::vcpu::VcpuError;

/// Time until a pause or a reset is tried again. The other vCPUs stand still during each attempt.
pub(super) const AGAIN: Duration = Duration::from_secs(10);

impl Vm {
    /// Pauses the VM if it runs, or pauses it later. Returns the exit if it cannot be paused at all.
    pub(super) fn pause_or_defer(&mut self, reason: PauseReason) -> Option<VmExit> {
        if self.deferred_reset.is_some() {
            return None;
        }
        // The next attempt is due later, for all reasons.
        if self.state == State::Running && !self.deferred_pauses.is_empty() {
            self.deferred_pauses.insert(reason);
            return None;
        }
        self.pause_now(reason)
    }

    fn pause_now(&mut self, reason: PauseReason) -> Option<VmExit> {
        if !matches!(self.state, State::Running | State::Paused) {
            return None;
        }
        match self.try_pause(reason) {
            Ok(()) => None,
            Err(error) => self.pause_failed(reason, &error),
        }
    }

    fn pause_failed(&mut self, reason: PauseReason, error: &MachineError) -> Option<VmExit> {
        if !matches!(error, MachineError::Vcpu(VcpuError::Unresponsive(_))) {
            return Some(VmExit::error(error));
        }
        tracing::warn!(%error, again = ?AGAIN, "the pause is deferred: the VM runs until the next attempt");
        self.deferred_pauses.insert(reason);
        (self.retry.0)(Some(AGAIN));
        None
    }

    /// Tries again to pause a VM that could not be paused.
    pub(super) fn retry_deferred_pause(&mut self) -> Option<VmExit> {
        let reason = self.deferred_pauses.iter().next()?;
        self.pause_now(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Message;
    use super::super::testing::{messages_after, running};
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_pause_that_a_vcpu_does_not_answer_is_tried_again() {
        let mut vm = running();
        let late = || MachineError::from(VcpuError::Unresponsive(0));
        for reason in [PauseReason::IoError, PauseReason::Watchdog] {
            assert_eq!(vm.pause_failed(reason, &late()), None);
        }
        // Another queue of the disk reports.
        assert_eq!(vm.disk_stopped("root".into(), "error".into()), None);
        assert!(vm.state == State::Running && vm.pause_reasons.is_empty());
        let messages = messages_after(&mut vm, AGAIN * 2).await;
        let is_due = |message: &Message| matches!(message, Message::Retry);
        assert!(messages.iter().any(is_due), "{messages:?}");
        assert_eq!(vm.retry_deferred_pause(), None);
        let reasons: Vec<_> = vm.pause_reasons.iter().collect();
        assert_eq!(vm.state, State::Paused);
        assert_eq!(reasons, [PauseReason::IoError, PauseReason::Watchdog]);
        vm.set_state(State::Running);
        assert_eq!(vm.retry_deferred_pause(), None);
        assert_eq!(vm.state, State::Running);
    }

    #[tokio::test]
    async fn another_error_of_a_pause_ends_the_vm() {
        let mut vm = running();
        let error = MachineError::NotPaused;
        let exit = vm.pause_failed(PauseReason::IoError, &error);
        assert_eq!(exit, Some(VmExit::error(error)));
        assert!(vm.deferred_pauses.is_empty());
    }
}
