//! The signals that end a command.

use anyhow::Result;
use nix::errno::Errno;
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// SIGINT, SIGTERM, SIGHUP (and SIGCHLD), received by waiting for them instead of killing this process.
#[derive(Debug)]
pub struct Signals {
    set: SigSet,
    before: SigSet,
}

impl Signals {
    /// Takes them until dropped.
    pub fn take() -> Result<Self> {
        let set: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD]
            .into_iter()
            .collect();
        let before = set.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
        Ok(Self { set, before })
    }

    /// Makes `command` deaf to the terminal's signals, which come through us, and end with this process.
    pub fn deafen(&self, command: &mut Command) {
        self.prepare(command, SigHandler::SigIgn);
    }

    /// Makes `command` hear signals as this process did before it took them, and end with this process.
    pub fn hear(&self, command: &mut Command) {
        self.prepare(command, SigHandler::SigDfl);
    }

    fn prepare(&self, command: &mut Command, handler: SigHandler) {
        let before = self.before;
        // SAFETY: only async-signal-safe system calls, no allocation; neither handler is code of ours.
        unsafe {
            command.pre_exec(move || {
                for number in [Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
                    signal(number, handler)?;
                }
                before.thread_set_mask()?;
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                Ok(())
            });
        }
    }

    /// The next one within `limit`.
    pub fn wait(&self, limit: Duration) -> Result<Option<Signal>> {
        let limit = libc::timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        // SAFETY: both pointers are to live values of the right types; no information is asked for.
        let number = unsafe { libc::sigtimedwait(self.set.as_ref(), std::ptr::null_mut(), &limit) };
        if number < 0 {
            return match Errno::last() {
                Errno::EAGAIN | Errno::EINTR => Ok(None),
                error => Err(error.into()),
            };
        }
        Ok(Some(Signal::try_from(number)?))
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // Can only fail for a bad argument.
        let _ = self.before.thread_set_mask();
    }
}
