//! Resets for which no caller waits: by the guest, and by the watchdog.
//!
//! A vCPU that waits for a device's requests cannot be stopped, as for a [deferred pause](super::deferred_pause). The
//! reset is tried again.

use super::deferred_pause::AGAIN;
use super::{Vm, VmExit};
use crate::vcpu::VcpuError;

impl Vm {
    /// Resets the machine, or does so later. Returns the exit if that ends the VM.
    pub(super) fn reset_or_defer(&mut self, cause: &'static str) -> Option<VmExit> {
        // The next attempt is due later.
        match self.deferred_reset {
            Some(_) => None,
            None => self.reset_now(cause),
        }
    }

    fn reset_now(&mut self, cause: &'static str) -> Option<VmExit> {
        self.reset(cause).unwrap_or_else(|error| {
            self.reset_failed(cause, &error);
            None
        })
    }

    fn reset_failed(&mut self, cause: &'static str, error: &VcpuError) {
        tracing::warn!(%error, cause, again = ?AGAIN, "the reset is deferred: the VM runs until the next attempt");
        self.deferred_reset = Some(cause);
        (self.retry.0)(Some(AGAIN));
    }

    /// Tries again to reset a machine that could not be reset.
    pub(super) fn retry_deferred_reset(&mut self) -> Option<VmExit> {
        let cause = self.deferred_reset?;
        self.reset_now(cause)
    }
}

#[cfg(test)]
mod tests {
    use husk_devices::legacy::MachineEvent;
    use husk_proto::vmm::v1::{ExitReason, PauseReason, State};
    use tokio::sync::oneshot;

    use super::super::Message;
    use super::super::testing::{messages_after, running, with_machine};
    use super::*;
    use crate::control::service::VmmCommand;
    use crate::machine::{VmEvent, testing};

    async fn rings(vm: &mut Vm) -> bool {
        let messages = messages_after(vm, AGAIN * 2).await;
        messages.iter().any(|message| matches!(message, Message::Retry))
    }

    #[tokio::test(start_paused = true)]
    async fn a_reset_that_is_due_comes_before_a_pause_and_a_save() {
        let mut vm = running();
        vm.reset_failed("watchdog", &VcpuError::Unresponsive(0));
        assert_eq!(vm.reset_or_defer("i8042"), None);
        assert_eq!(vm.deferred_reset, Some("watchdog"));
        assert_eq!(vm.pause_or_defer(PauseReason::IoError), None);
        assert!(vm.state == State::Running && vm.deferred_pauses.is_empty());
        assert!(rings(&mut vm).await);
        vm.pause(PauseReason::Snapshot).unwrap();
        let refused = vm.save(false).unwrap_err();
        assert_eq!(refused.message(), "the machine is to be reset");
    }

    #[tokio::test(start_paused = true)]
    #[ignore = "needs /dev/kvm"]
    async fn a_vcpu_that_does_not_answer_puts_a_reset_off() {
        let mut vm = with_machine();
        let machine = |vm: &mut Vm, act: fn(&mut _)| act(&mut vm.running.as_mut().unwrap().machine);
        let _copy = vm.start_precopy().unwrap();
        machine(&mut vm, testing::silence);
        let (reply, answer) = oneshot::channel();
        assert_eq!(vm.handle_command(VmmCommand::Reset(reply)), None);
        assert_eq!(
            answer.await.unwrap().unwrap_err().message(),
            "vCPU 0 does not answer"
        );
        assert!(!testing::is_halted(vm.machine().unwrap()), "it runs on");
        assert!(vm.deferred_reset.is_none() && vm.precopy.is_some());

        let reset = VmEvent::Guest(MachineEvent::Reset("i8042"));
        assert_eq!(vm.handle_event(reset), None);
        assert_eq!((vm.deferred_reset, vm.state), (Some("i8042"), State::Running));
        assert!(rings(&mut vm).await);
        assert_eq!(vm.retry_deferred_reset(), None);
        assert!(rings(&mut vm).await, "again and again");
        assert!(vm.precopy.is_some(), "the machine was not reset");
        machine(&mut vm, testing::remove_vcpus);
        let exit = vm.retry_deferred_reset().unwrap();
        assert_eq!(
            exit.reason,
            ExitReason::BootFailed,
            "it boots, but there is no disk"
        );
        assert!(vm.deferred_reset.is_none() && vm.precopy.is_none());
    }
}
