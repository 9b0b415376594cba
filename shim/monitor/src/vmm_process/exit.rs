//! The exit of a VMM.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use husk_proto::vmm::v1::ExitReason;

/// The exit of a VMM, from its exit status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmmExit {
    /// The reason. [`ExitReason::Error`] for signals and for statuses without a meaning of their own.
    pub reason: ExitReason,
    /// The signal or status, and the last error that the VMM logged, as text.
    pub detail: String,
    /// A signal killed the process.
    pub by_signal: bool,
}

impl VmmExit {
    pub(super) fn from_status(status: ExitStatus, last_error: Option<String>) -> VmmExit {
        let (reason, how) = match (status.code(), status.signal()) {
            (Some(code), _) => match reason_of(code) {
                Some(reason) => (reason, None),
                None => (
                    ExitReason::Error,
                    Some(format!("the VMM exited with status {code}")),
                ),
            },
            (None, signal) => (
                ExitReason::Error,
                Some(match signal {
                    Some(libc::SIGSYS) => FILTERED.to_owned(),
                    other => format!("the VMM was killed by {}", signal_name(other)),
                }),
            ),
        };
        let detail = match (how, last_error) {
            (Some(how), Some(words)) => format!("{how}: {words}"),
            (how, words) => how.or(words).unwrap_or_default(),
        };
        VmmExit {
            reason,
            detail,
            by_signal: status.signal().is_some(),
        }
    }
}

/// The text for SIGSYS. The kernel logs the thread's name and the call's number, to the audit daemon if there is one.
const FILTERED: &str = "\
    the VMM was killed for a system call that its seccomp filter refuses: a bug of Husk's, or a guest that broke out; \
    `dmesg` or `ausearch -m SECCOMP` has a line with type=1326 that names thread and call";

/// Maps the exit statuses of husk-vmm. They are listed with `ExitReason` in vmm.proto.
fn reason_of(code: i32) -> Option<ExitReason> {
    Some(match code {
        0 => ExitReason::Poweroff,
        1 => ExitReason::Error,
        10 => ExitReason::GuestPanic,
        11 => ExitReason::TripleFault,
        12 => ExitReason::BootFailed,
        13 => ExitReason::ControlClosed,
        14 => ExitReason::Watchdog,
        _ => return None,
    })
}

/// Names of the signals from 1 on.
const SIGNAL_NAMES: [&str; 31] = [
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
];

fn signal_name(signal: Option<i32>) -> String {
    let Some(number) = signal else {
        return "a signal".to_owned();
    };
    let place = usize::try_from(number)
        .ok()
        .and_then(|number| number.checked_sub(1));
    match place.and_then(|place| SIGNAL_NAMES.get(place)) {
        Some(name) => (*name).to_owned(),
        None => format!("signal {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(raw: i32, words: Option<&str>) -> VmmExit {
        VmmExit::from_status(ExitStatus::from_raw(raw), words.map(str::to_owned))
    }

    #[test]
    fn each_status_of_the_vmm_maps_to_its_error() {
        assert_eq!(
            exit(0, None),
            VmmExit {
                reason: ExitReason::Poweroff,
                detail: String::new(),
                by_signal: false
            }
        );
        assert_eq!(exit(12 << 8, Some("no kernel")).reason, ExitReason::BootFailed);
        assert_eq!(exit(12 << 8, Some("no kernel")).detail, "no kernel");
        assert_eq!(
            exit(101 << 8, Some("panicked")).detail,
            "the VMM exited with status 101: panicked"
        );
        assert_eq!(exit(9, None).detail, "the VMM was killed by SIGKILL");
        assert_eq!(exit(9, None).reason, ExitReason::Error);
        assert!(exit(9, None).by_signal);
        assert_eq!(exit(libc::SIGPWR, None).detail, "the VMM was killed by SIGPWR");
        assert_eq!(exit(34, None).detail, "the VMM was killed by signal 34");
    }

    #[test]
    fn seccomp_kill_is_distinguished() {
        let killed = exit(libc::SIGSYS, Some("worker panicked"));
        assert_eq!(killed.reason, ExitReason::Error);
        assert!(killed.by_signal);
        for words in ["seccomp filter", "type=1326", ": worker panicked"] {
            assert!(killed.detail.contains(words), "{}", killed.detail);
        }
    }
}
