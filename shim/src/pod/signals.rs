//! Signals to a VM.

use std::time::Duration;

use super::container::ContainerVm;
use super::task_error::TaskError;

/// Maximum time for the end of a VM that was killed.
pub(super) const KILLED_WITHIN: Duration = Duration::from_secs(4);

pub(super) const SIGKILL: u32 = 9;
const SIGTERM: u32 = 15;
/// SIGCHLD, SIGCONT and SIGSTOP: nobody sends them to end a process.
const NOT_ENDING: [u32; 3] = [17, 18, 19];
/// SIGTSTP, SIGTTIN, SIGTTOU and SIGWINCH: a terminal sends them to its processes.
const OF_TERMINAL: [u32; 4] = [20, 21, 22, 28];
/// SIGRTMAX.
const LAST_SIGNAL: u32 = 64;
/// Base of the exit status of a process that a signal killed.
const BY_SIGNAL: u32 = 128;

/// Exit status of a process that SIGKILL killed.
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
        _ if NOT_ENDING.contains(&signal) => Ok(SignalAction::Nothing),
        // An image may name any of them as its stop signal: Apache's images have SIGWINCH.
        1..=LAST_SIGNAL => Ok(SignalAction::PowerButton),
        _ => Err(TaskError::invalid(format!(
            "there is no signal {signal}: {SIGTERM} presses the VM's power button, {SIGKILL} kills it"
        ))),
    }
}

/// True for the signals of a terminal. `ctr run` passes on those that it gets. In a pod nobody does, so that there they
/// are stop signals of images.
pub(super) fn is_of_terminal(signal: u32) -> bool {
    OF_TERMINAL.contains(&signal)
}

/// Returns the exit status of a container without a VM for this signal, or `None` if the signal does not end it.
pub(super) fn signal_exit_status(signal: u32) -> Result<Option<u32>, TaskError> {
    Ok(match signal_action(signal)? {
        SignalAction::Nothing => None,
        SignalAction::PowerButton | SignalAction::Kill => Some(BY_SIGNAL + signal),
    })
}

/// As [`signal_exit_status`], for a container that ends with 0 if it is asked to end.
pub(super) fn orderly_exit_status(signal: u32) -> Result<Option<u32>, TaskError> {
    Ok(match signal_action(signal)? {
        SignalAction::Nothing => None,
        SignalAction::PowerButton => Some(0),
        SignalAction::Kill => Some(KILLED),
    })
}

impl ContainerVm {
    /// Carries out a signal. A VM that has not booted has no power button and is killed.
    pub(super) async fn signal(&self, signal: u32, boots: bool) -> Result<(), TaskError> {
        let done = match signal_action(signal)? {
            SignalAction::Nothing => Ok(()),
            SignalAction::PowerButton if !boots => self.handle.shutdown(None).await.map(drop),
            SignalAction::PowerButton | SignalAction::Kill => self.handle.kill().await,
        };
        done.map_err(|error| TaskError::not_found(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_map_to_vm_actions() {
        assert_eq!(signal_action(15).unwrap(), SignalAction::PowerButton);
        assert_eq!(signal_action(9).unwrap(), SignalAction::Kill);
        assert_eq!(
            (signal_exit_status(9).unwrap(), signal_exit_status(0).unwrap()),
            (Some(137), None)
        );
        assert_eq!(
            [0, 9, 15].map(|signal| orderly_exit_status(signal).unwrap()),
            [None, Some(137), Some(0)]
        );
        for signal in NOT_ENDING {
            assert_eq!(signal_action(signal).unwrap(), SignalAction::Nothing);
        }
        let error = signal_action(65).unwrap_err().to_string();
        assert!(error.starts_with("there is no signal 65"), "{error}");
    }

    #[test]
    fn any_stop_signal_of_an_image_ends_its_container() {
        // SIGHUP, SIGUSR1, SIGTSTP, SIGWINCH, SIGPWR, SIGRTMIN+3 and SIGRTMAX.
        for signal in [1, 10, 20, 28, 30, 37, 64] {
            assert_eq!(signal_action(signal).unwrap(), SignalAction::PowerButton);
            assert_eq!(signal_exit_status(signal).unwrap(), Some(128 + signal));
        }
    }
}
