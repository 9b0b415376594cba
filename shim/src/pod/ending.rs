//! Signals, and what the end of a VM is as the exit of a process.

use std::time::Duration;

use husk_proto::shim::v1::{Phase, Status as VmStatus};
use husk_proto::vmm::v1::ExitReason;

use super::Refusal;
use super::container::Vm;

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
enum Meaning {
    PowerButton,
    Kill,
    Nothing,
}

fn meaning(signal: u32) -> Result<Meaning, Refusal> {
    match signal {
        0 => Ok(Meaning::Nothing),
        SIGKILL => Ok(Meaning::Kill),
        SIGTERM | SIGINT | SIGQUIT | SIGPWR | HALT => Ok(Meaning::PowerButton),
        _ => Err(Refusal::invalid(format!(
            "signal {signal} means nothing to a VM: {SIGTERM} presses its power button, {SIGKILL} kills it"
        ))),
    }
}

/// The exit status of a container without a process that gets this signal, if it ends.
pub(super) fn ends_nothing(signal: u32) -> Result<Option<u32>, Refusal> {
    Ok(match meaning(signal)? {
        Meaning::Nothing => None,
        Meaning::PowerButton | Meaning::Kill => Some(BY_SIGNAL + signal),
    })
}

impl Vm {
    /// Does what a signal means; one that does not run yet has no power button.
    pub(super) async fn act(&self, signal: u32, boots: bool) -> Result<(), Refusal> {
        let done = match meaning(signal)? {
            Meaning::Nothing => Ok(()),
            Meaning::PowerButton if !boots => self.handle.shutdown(None).await.map(drop),
            Meaning::PowerButton | Meaning::Kill => self.handle.kill().await,
        };
        done.map_err(|status| Refusal::not_found(status.message()))
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
        assert_eq!(meaning(15).unwrap(), Meaning::PowerButton);
        assert_eq!(meaning(9).unwrap(), Meaning::Kill);
        assert_eq!(
            (ends_nothing(9).unwrap(), ends_nothing(0).unwrap()),
            (Some(137), None)
        );
        assert!(
            meaning(28)
                .unwrap_err()
                .to_string()
                .contains("signal 28 means nothing")
        );
    }
}
