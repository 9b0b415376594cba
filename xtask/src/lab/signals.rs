//! The signals that end a command.

use anyhow::{Context, Result};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::io;
use std::mem::MaybeUninit;
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

/// Reaction of a process to a signal, without a handler.
#[derive(Debug, Clone, Copy)]
pub enum Disposition {
    /// The default reaction.
    Default,
    /// None.
    Ignore,
}

impl Disposition {
    /// Makes it this process's reaction to `signal`. Async-signal-safe.
    pub fn set(self, signal: Signal) -> io::Result<()> {
        let handler = match self {
            Self::Default => libc::SIG_DFL,
            Self::Ignore => libc::SIG_IGN,
        };
        // SAFETY: neither is a handler of this program.
        if unsafe { libc::signal(signal.as_raw(), handler) } == libc::SIG_ERR {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// A set of signals.
#[derive(Debug, Clone, Copy)]
pub struct SignalSet(libc::sigset_t);

impl SignalSet {
    /// The set of these signals.
    pub fn of(signals: &[Signal]) -> Self {
        let mut set = MaybeUninit::uninit();
        // SAFETY: sigemptyset initialises the set, and sigaddset changes an initialised one.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in signals {
                libc::sigaddset(set.as_mut_ptr(), signal.as_raw());
            }
            Self(set.assume_init())
        }
    }

    /// Blocks the signals in this thread; returns those that were blocked before.
    fn block(&self) -> io::Result<Self> {
        self.mask(libc::SIG_BLOCK)
    }

    /// Blocks the signals in this thread, and no others. Async-signal-safe.
    pub fn set_mask(&self) -> io::Result<()> {
        self.mask(libc::SIG_SETMASK).map(drop)
    }

    fn mask(&self, how: i32) -> io::Result<Self> {
        let mut before = Self::of(&[]);
        // SAFETY: both pointers are to live sets.
        match unsafe { libc::pthread_sigmask(how, &self.0, &mut before.0) } {
            0 => Ok(before),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Ends this process on SIGINT, SIGTERM and SIGHUP, after the commands that run in labs have been ended.
///
/// For a process with several threads that run commands. Call it before any other thread is started, because threads
/// inherit the signal mask.
pub fn exit_on_signals() -> Result<()> {
    let set = SignalSet::of(&[Signal::INT, Signal::TERM, Signal::HUP]);
    set.block()?;
    std::thread::spawn(move || {
        while INTERRUPTED.load(Ordering::Relaxed) == 0 {
            if let Ok(Some(signal)) = next(&set, POLL) {
                INTERRUPTED.store(signal.as_raw(), Ordering::Relaxed);
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
    set: SignalSet,
    before: SignalSet,
}

impl Signals {
    /// Blocks the signals until dropped.
    pub fn take() -> Result<Self> {
        let set = SignalSet::of(&[Signal::INT, Signal::TERM, Signal::HUP, Signal::CHILD]);
        let before = set.block()?;
        TAKEN.fetch_add(1, Ordering::Relaxed);
        Ok(Self { set, before })
    }

    /// Makes `command` ignore the terminal's signals, which this process passes on, and end with this process.
    pub fn ignore_in(&self, command: &mut Command) {
        self.prepare(command, Disposition::Ignore);
    }

    /// Gives `command` the signal handling that this process had before [`Signals::take`], and ends it with this
    /// process.
    pub fn restore_in(&self, command: &mut Command) {
        self.prepare(command, Disposition::Default);
    }

    fn prepare(&self, command: &mut Command, disposition: Disposition) {
        let before = self.before;
        // SAFETY: only async-signal-safe system calls, no allocation.
        unsafe {
            command.pre_exec(move || {
                for signal in [Signal::INT, Signal::HUP, Signal::QUIT] {
                    disposition.set(signal)?;
                }
                before.set_mask()?;
                Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
            });
        }
    }

    /// The next signal within `limit`. A signal that another thread received counts too.
    pub fn wait(&self, limit: Duration) -> Result<Option<Signal>> {
        let deadline = Instant::now().checked_add(limit);
        loop {
            let interrupted = INTERRUPTED.load(Ordering::Relaxed);
            if interrupted != 0 {
                return Ok(Some(named(interrupted)?));
            }
            let left = deadline.map_or(POLL, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if let Some(signal) = next(&self.set, left.min(POLL))? {
                if signal != Signal::CHILD {
                    INTERRUPTED.store(signal.as_raw(), Ordering::Relaxed);
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
fn next(set: &SignalSet, limit: Duration) -> Result<Option<Signal>> {
    let limit = libc::timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // SAFETY: both pointers are to live values of the right types; no information is asked for.
    let number = unsafe { libc::sigtimedwait(&set.0, std::ptr::null_mut(), &limit) };
    if number < 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Ok(None),
            _ => Err(error.into()),
        };
    }
    Ok(Some(named(number)?))
}

fn named(number: i32) -> Result<Signal> {
    Signal::from_named_raw(number).with_context(|| format!("signal {number} has no name"))
}

impl Drop for Signals {
    fn drop(&mut self) {
        TAKEN.fetch_sub(1, Ordering::Relaxed);
        // Can only fail for a bad argument.
        let _ = self.before.set_mask();
    }
}
