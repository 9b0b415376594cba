//! The final status of a VM, from the exit of its VMM.

use husk_proto::shim::v1::Phase;
use husk_proto::vmm::v1::ExitReason;
use husk_proto::vmm::v1::event::Exit;

use crate::vmm_process::VmmExit;

/// The final status of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FinalStatus {
    pub(super) phase: Phase,
    pub(super) reason: &'static str,
    pub(super) message: String,
    /// The VMM's exit reason. Unspecified if there was no VMM.
    pub(super) exit: ExitReason,
}

/// The reason for killing a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KillReason {
    /// A request to kill it.
    Requested,
    /// The guest did not power off in time.
    GraceExpired {
        /// The grace period.
        seconds: u64,
    },
    /// The program that started the VM exited before the VM ran.
    LauncherGone,
}

impl FinalStatus {
    /// The status of a VM that never ran.
    pub(super) fn not_started(reason: &'static str, message: String, exit: ExitReason) -> FinalStatus {
        FinalStatus {
            phase: Phase::Failed,
            reason,
            message,
            exit,
        }
    }

    /// The status of a VM that was killed. As in KubeVirt this is a failure of a VM that `may_power_off`: it has a power
    /// button (ACPI), and a grace period.
    pub(super) fn killed(why: KillReason, may_power_off: bool, exit: ExitReason) -> FinalStatus {
        let phase = if may_power_off {
            Phase::Failed
        } else {
            Phase::Succeeded
        };
        let (reason, message) = match why {
            KillReason::Requested => ("Killed", "the VM was killed on request".to_owned()),
            KillReason::GraceExpired { seconds } => (
                "GracePeriodExpired",
                format!("the guest did not power off within {seconds} s and was killed"),
            ),
            KillReason::LauncherGone => ("Killed", "the starting command exited first".to_owned()),
        };
        FinalStatus {
            phase,
            reason,
            message,
            exit,
        }
    }

    /// The status of a VM whose VMM exited by itself. The reason is in its exit event, or without one in its exit
    /// status.
    pub(super) fn of_vmm(process: &VmmExit, last_event: Option<&Exit>) -> FinalStatus {
        let (exit, detail) = match last_event {
            Some(event) if !process.by_signal => (event.reason(), event.detail.clone()),
            _ => (process.reason, process.detail.clone()),
        };
        let (phase, reason, fallback) = match exit {
            ExitReason::Poweroff => (Phase::Succeeded, "Poweroff", "the guest powered off"),
            ExitReason::GuestPanic => (Phase::Failed, "GuestPanic", "the guest kernel panicked"),
            ExitReason::TripleFault => (Phase::Failed, "TripleFault", "the guest reset by a triple fault"),
            ExitReason::BootFailed => (Phase::Failed, "BootFailed", "no kernel could be loaded"),
            ExitReason::Watchdog => (Phase::Failed, "Watchdog", "the guest's watchdog ran out"),
            _ if process.by_signal => (Phase::Failed, "VmmDied", "the VMM died"),
            _ => (Phase::Failed, "VmmFailed", "the VMM failed"),
        };
        let message = if detail.is_empty() {
            fallback.to_owned()
        } else {
            detail
        };
        FinalStatus {
            phase,
            reason,
            message,
            exit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(reason: ExitReason, detail: &str, by_signal: bool) -> VmmExit {
        VmmExit {
            reason,
            detail: detail.into(),
            by_signal,
        }
    }

    #[test]
    fn exit_event_explains_an_exit_but_not_a_signal() {
        let poweroff = Exit {
            reason: ExitReason::Poweroff.into(),
            detail: "guest powered off".into(),
        };
        let exited = process(ExitReason::Poweroff, "", false);
        let final_status = FinalStatus::of_vmm(&exited, Some(&poweroff));
        assert_eq!(
            (final_status.phase, final_status.reason),
            (Phase::Succeeded, "Poweroff")
        );
        assert_eq!(final_status.message, "guest powered off");
        let died = process(ExitReason::Error, "the VMM was killed by SIGKILL", true);
        let final_status = FinalStatus::of_vmm(&died, Some(&poweroff));
        assert_eq!(
            (final_status.phase, final_status.reason),
            (Phase::Failed, "VmmDied")
        );
        assert_eq!(final_status.message, "the VMM was killed by SIGKILL");
        let final_status = FinalStatus::of_vmm(&process(ExitReason::TripleFault, "", false), None);
        assert_eq!(
            (final_status.phase, final_status.reason),
            (Phase::Failed, "TripleFault")
        );
        assert_eq!(final_status.message, "the guest reset by a triple fault");
    }

    #[test]
    fn kill_fails_a_vm_that_may_power_off() {
        let killed = |may| FinalStatus::killed(KillReason::Requested, may, ExitReason::Poweroff).phase;
        assert_eq!((killed(true), killed(false)), (Phase::Failed, Phase::Succeeded));
    }
}
