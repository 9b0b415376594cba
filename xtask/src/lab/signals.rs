//! The signals that end a command.

use anyhow::Result;
use nix::errno::Errno;
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Polling interval of [`INTERRUPTED`].
const POLL: Duration = Duration::from_millis(100);

/// Maximum time that commands may take to end after a signal before this process exits.
const EXIT_LIMIT: Duration = Duration::from_secs(40);

/// The signal that one thread has received for all threads, or 0.
static INTERRUPTED: AtomicI32 = AtomicI32::new(0);

/// Number of [`Signals`] in use.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Ends this process on SIGINT, SIGTERM and SIGHUP, after the commands that run in labs have been ended.
///
/// For a process with several threads that run commands. Call it before any other thread is started, because threads
/// inherit the signal mask.
pub fn exit_on_signals() -> Result<()> {
    let set: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]
        .into_iter()
        .collect();
    set.thread_block()?;
    std::thread::spawn(move || {
        while INTERRUPTED.load(Ordering::Relaxed) == 0 {
            if let Ok(Some(signal)) = next(&set, POLL) {
                INTERRUPTED.store(signal as i32, Ordering::Relaxed);
            }
        }
        let deadline = Instant::now() + EXIT_LIMIT;
        while TAKEN.load(Ordering::Relaxed) > 0 && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        std::process::exit(128 + INTERRUPTED.load(Ordering::Relaxed));
    });
    Ok(())
}

/// SIGINT, SIGTERM, SIGHUP (and SIGCHLD), blocked and received synchronously, so that they do not kill this process.
#[derive(Debug)]
pub struct Signals {
    set: SigSet,
    before: SigSet,
}

impl Signals {
    /// Blocks the signals until dropped.
    pub fn take() -> Result<Self> {
        let set: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD]
            .into_iter()
            .collect();
        let before = set.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK)?;
        TAKEN.fetch_add(1, Ordering::Relaxed);
        Ok(Self { set, before })
    }

    /// Makes `command` ignore the terminal's signals, which this process passes on, and end with this process.
    pub fn ignore_in(&self, command: &mut Command) {
        self.prepare(command, SigHandler::SigIgn);
    }

    /// Gives `command` the signal handling that this process had before [`Signals::take`], and ends it with this
    /// process.
    pub fn restore_in(&self, command: &mut Command) {
        self.prepare(command, SigHandler::SigDfl);
    }

    fn prepare(&self, command: &mut Command, handler: SigHandler) {
        let before = self.before;
        // SAFETY: only async-signal-safe system calls, no allocation; neither handler is one of this program.
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

    /// The next signal within `limit`. A signal that another thread received counts too.
    pub fn wait(&self, limit: Duration) -> Result<Option<Signal>> {
        let deadline = Instant::now().checked_add(limit);
        loop {
            let interrupted = INTERRUPTED.load(Ordering::Relaxed);
            if interrupted != 0 {
                return Ok(Some(Signal::try_from(interrupted)?));
            }
            let left = deadline.map_or(POLL, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if let Some(signal) = next(&self.set, left.min(POLL))? {
                if signal != Signal::SIGCHLD {
                    INTERRUPTED.store(signal as i32, Ordering::Relaxed);
                }
                return Ok(Some(signal));
            }
            if left.is_zero() {
                return Ok(None);
            }
        }
    }
}

/// The next signal of `set` that is pending within `limit`.
fn next(set: &SigSet, limit: Duration) -> Result<Option<Signal>> {
    let limit = libc::timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // SAFETY: both pointers are to live values of the right types; no information is asked for.
    let number = unsafe { libc::sigtimedwait(set.as_ref(), std::ptr::null_mut(), &limit) };
    if number < 0 {
        return match Errno::last() {
            Errno::EAGAIN | Errno::EINTR => Ok(None),
            error => Err(error.into()),
        };
    }
    Ok(Some(Signal::try_from(number)?))
}

impl Drop for Signals {
    fn drop(&mut self) {
        TAKEN.fetch_sub(1, Ordering::Relaxed);
        // Can only fail for a bad argument.
        let _ = self.before.thread_set_mask();
    }
}
