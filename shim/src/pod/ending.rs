//! Signals, and what the end of a VM is as the exit of a process.

use std::time::Duration;

use husk_proto::shim::v1::{Phase, Status as VmStatus};
use husk_proto::vmm::v1::ExitReason;

use super::TaskError;
use super::container::ContainerVm;

/// How long a VM that is killed takes at most.
pub(super) const KILLED_WITHIN: Duration = Duration::from_secs(4);

const SIGINT: u32 = 2;
const SIGQUIT: u32 = 3;
const SIGKILL: u32 = 9;
const SIGTERM: u32 = 15;
const SIGPWR: u32 = 30;
/// SIGRTMIN+3, by which images with systemd want to be stopped.
const HALT: u32 = 37;
/// The exit status of a process that a signal ended, without the signal.
const BY_SIGNAL: u32 = 128;

/// That of one that was killed.
pub(super) const KILLED: u32 = BY_SIGNAL + SIGKILL;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SignalAction {
    PowerButton,
    Kill,
    Nothing,
}

fn signal_action(signal: u32) -> Result<SignalAction, TaskError> {
    match signal {
        0 => Ok(SignalAction::Nothing),
        SIGKILL => Ok(SignalAction::Kill),
        SIGTERM | SIGINT | SIGQUIT | SIGPWR | HALT => Ok(SignalAction::PowerButton),
        _ => Err(TaskError::invalid(format!(
            "signal {signal} means nothing to a VM: {SIGTERM} presses its power button, {SIGKILL} kills it"
        ))),
    }
}

/// The exit status of a container without a process that gets this signal, if it ends.
pub(super) fn signal_exit_status(signal: u32) -> Result<Option<u32>, TaskError> {
    Ok(match signal_action(signal)? {
        SignalAction::Nothing => None,
        SignalAction::PowerButton | SignalAction::Kill => Some(BY_SIGNAL + signal),
    })
}

impl ContainerVm {
    /// Does what a signal means; one that does not run yet has no power button.
    pub(super) async fn signal(&self, signal: u32, boots: bool) -> Result<(), TaskError> {
        let done = match signal_action(signal)? {
            SignalAction::Nothing => Ok(()),
            SignalAction::PowerButton if !boots => self.handle.shutdown(None).await.map(drop),
            SignalAction::PowerButton | SignalAction::Kill => self.handle.kill().await,
        };
        done.map_err(|status| TaskError::not_found(status.message()))
    }
}

/// A VM's end as an exit status, and what is to be said of it where the guest has not said it: it did not power off.
pub(super) fn exit_status(status: &VmStatus, oom: bool) -> (u32, Option<String>) {
    if status.phase() == Phase::Succeeded {
        return (0, None);
    }
    let killed = matches!(status.reason.as_str(), "Killed" | "GracePeriodExpired");
    let exit = match status.exit() {
        _ if killed || oom => KILLED,
        ExitReason::GuestPanic => 10,
        ExitReason::TripleFault => 11,
        ExitReason::BootFailed => 12,
        _ if status.reason == "VmmDied" => KILLED,
        _ => 1,
    };
    let words = if oom {
        "the VM was killed for want of memory: raise resources.limits.memory".to_owned()
    } else {
        status.message.clone()
    };
    (exit, Some(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(phase: Phase, reason: &str, exit: ExitReason) -> VmStatus {
        VmStatus {
            phase: phase.into(),
            reason: reason.into(),
            message: "why".into(),
            exit: exit.into(),
            ..VmStatus::default()
        }
    }

    #[test]
    fn ends_have_their_exit_status() {
        let exit = |phase, reason, exit, oom| exit_status(&status(phase, reason, exit), oom);
        assert_eq!(
            exit(Phase::Succeeded, "Poweroff", ExitReason::Poweroff, false),
            (0, None)
        );
        let failed = [
            ("Killed", ExitReason::Poweroff, 137),
            ("GracePeriodExpired", ExitReason::Error, 137),
            ("GuestPanic", ExitReason::GuestPanic, 10),
            ("TripleFault", ExitReason::TripleFault, 11),
            ("BootFailed", ExitReason::BootFailed, 12),
            ("VmmDied", ExitReason::Error, 137),
            ("VmmFailed", ExitReason::Error, 1),
        ];
        for (reason, why, wanted) in failed {
            let (status, words) = exit(Phase::Failed, reason, why, false);
            assert_eq!((status, words.as_deref()), (wanted, Some("why")), "{reason}");
        }
        let (status, words) = exit(Phase::Failed, "VmmDied", ExitReason::Error, true);
        assert!(status == 137 && words.unwrap().contains("for want of memory"));
    }

    #[test]
    fn signals_mean_what_a_vm_can_do() {
        assert_eq!(signal_action(15).unwrap(), SignalAction::PowerButton);
        assert_eq!(signal_action(9).unwrap(), SignalAction::Kill);
        assert_eq!(
            (signal_exit_status(9).unwrap(), signal_exit_status(0).unwrap()),
            (Some(137), None)
        );
        assert!(
            signal_action(28)
                .unwrap_err()
                .to_string()
                .contains("signal 28 means nothing")
        );
    }
}
