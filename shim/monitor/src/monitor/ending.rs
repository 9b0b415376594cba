//! What the end of a VMM means for its VM.

use std::error::Error;

use husk_proto::shim::v1::Phase;
use husk_proto::vmm::v1::ExitReason;
use husk_proto::vmm::v1::event::Exit;

use crate::vmm_process::VmExit;

/// A final status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ending {
    pub(super) phase: Phase,
    pub(super) reason: &'static str,
    pub(super) message: String,
    /// Why the VMM ended; unspecified where there was none.
    pub(super) exit: ExitReason,
}

/// Who ended the VM, if not the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KilledBecause {
    /// Somebody said so.
    Asked,
    /// The guest did not power off in time.
    GraceExpired {
        /// The time it had.
        seconds: u64,
    },
    /// The program that started the VM was gone before it ran.
    StarterGone,
}

impl Ending {
    /// A VM that never ran.
    pub(super) fn not_started(reason: &'static str, message: String, exit: ExitReason) -> Ending {
        Ending {
            phase: Phase::Failed,
            reason,
            message,
            exit,
        }
    }

    /// A VM that was killed. As with KubeVirt that is a failure, unless there is no ACPI to ask the guest with.
    pub(super) fn killed(why: KilledBecause, acpi: bool, exit: ExitReason) -> Ending {
        let phase = if acpi { Phase::Failed } else { Phase::Succeeded };
        let (reason, message) = match why {
            KilledBecause::Asked => ("Killed", "the VM was killed on request".to_owned()),
            KilledBecause::GraceExpired { seconds } => (
                "GracePeriodExpired",
                format!("the guest did not power off within {seconds} s and was killed"),
            ),
            KilledBecause::StarterGone => (
                "Killed",
                "whoever started the VM was gone before it ran".to_owned(),
            ),
        };
        Ending {
            phase,
            reason,
            message,
            exit,
        }
    }

    /// A VMM that ended by itself. Its last event says why; its status does where the event did not get through.
    pub(super) fn of_vmm(process: &VmExit, last_event: Option<&Exit>) -> Ending {
        let (exit, detail) = match last_event {
            Some(event) if !process.by_signal => (event.reason(), event.detail.clone()),
            _ => (process.reason, process.detail.clone()),
        };
        let (phase, reason, fallback) = match exit {
            ExitReason::Poweroff => (Phase::Succeeded, "Poweroff", "the guest powered off"),
            ExitReason::GuestPanic => (Phase::Failed, "GuestPanic", "the guest kernel panicked"),
            ExitReason::TripleFault => (Phase::Failed, "TripleFault", "the guest reset by a triple fault"),
            ExitReason::BootFailed => (Phase::Failed, "BootFailed", "no kernel could be loaded"),
            _ if process.by_signal => (Phase::Failed, "VmmDied", "the VMM died"),
            _ => (Phase::Failed, "VmmFailed", "the VMM failed"),
        };
        let message = if detail.is_empty() {
            fallback.to_owned()
        } else {
            detail
        };
        Ending {
            phase,
            reason,
            message,
            exit,
        }
    }
}

/// An error and its causes on one line; a cause that its effect quotes already is not repeated.
pub(super) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(reason: ExitReason, detail: &str, by_signal: bool) -> VmExit {
        VmExit {
            reason,
            detail: detail.into(),
            by_signal,
        }
    }

    #[test]
    fn the_last_event_explains_an_exit_but_not_a_signal() {
        let poweroff = Exit {
            reason: ExitReason::Poweroff.into(),
            detail: "guest powered off".into(),
        };
        let exited = process(ExitReason::Poweroff, "", false);
        let ending = Ending::of_vmm(&exited, Some(&poweroff));
        assert_eq!((ending.phase, ending.reason), (Phase::Succeeded, "Poweroff"));
        assert_eq!(ending.message, "guest powered off");
        let died = process(ExitReason::Error, "the VMM was killed by SIGKILL", true);
        let ending = Ending::of_vmm(&died, Some(&poweroff));
        assert_eq!((ending.phase, ending.reason), (Phase::Failed, "VmmDied"));
        assert_eq!(ending.message, "the VMM was killed by SIGKILL");
        let ending = Ending::of_vmm(&process(ExitReason::TripleFault, "", false), None);
        assert_eq!((ending.phase, ending.reason), (Phase::Failed, "TripleFault"));
        assert_eq!(ending.message, "the guest reset by a triple fault");
    }

    #[test]
    fn a_kill_fails_a_vm_that_could_have_been_asked() {
        let killed = |acpi| Ending::killed(KilledBecause::Asked, acpi, ExitReason::Poweroff).phase;
        assert_eq!((killed(true), killed(false)), (Phase::Failed, Phase::Succeeded));
    }

    #[test]
    fn a_chain_says_nothing_twice() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer: {0}")]
        struct Quoting(#[source] std::io::Error);
        #[derive(Debug, thiserror::Error)]
        #[error("start failed")]
        struct Outer(#[source] Quoting);
        let error = Outer(Quoting(std::io::Error::other("no space")));
        assert_eq!(chain(&error), "start failed: outer: no space");
    }
}
