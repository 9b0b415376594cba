//! Signals that stop a foreground command.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::failure::Failure;

/// A signal that asks the command to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopSignal {
    /// Ctrl-C.
    Interrupt,
    /// Sent by service managers.
    Terminate,
    /// The terminal was closed.
    Hangup,
}

impl StopSignal {
    /// Name of the signal.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::Hangup => "SIGHUP",
        }
    }

    /// Exit status of a command ended by it: 128 plus its number, as in shells.
    pub(crate) fn status(self) -> u8 {
        let signal: u8 = match self {
            Self::Hangup => 1,
            Self::Interrupt => 2,
            Self::Terminate => 15,
        };
        128 + signal
    }
}

/// Handlers for SIGINT, SIGTERM and SIGHUP. A signal that was ignored when the process started stays so: `nohup` starts
/// commands that way.
#[derive(Debug)]
pub(crate) struct Signals {
    interrupt: Option<Signal>,
    terminate: Option<Signal>,
    hangup: Option<Signal>,
}

impl Signals {
    /// Installs the handlers.
    pub(crate) fn catch() -> io::Result<Self> {
        Ok(Self {
            interrupt: unless_ignored(SignalKind::interrupt())?,
            terminate: unless_ignored(SignalKind::terminate())?,
            hangup: unless_ignored(SignalKind::hangup())?,
        })
    }

    /// Waits for `work`, unless a signal arrives first: then fails with its exit status.
    pub(crate) async fn unless_asked<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            done = work => Ok(done),
            asked = self.next() => Err(Failure::Ended(asked.status())),
        }
    }

    /// Waits for the next signal. Cancellation-safe.
    pub(crate) async fn next(&mut self) -> StopSignal {
        tokio::select! {
            () = received(&mut self.interrupt) => StopSignal::Interrupt,
            () = received(&mut self.terminate) => StopSignal::Terminate,
            () = received(&mut self.hangup) => StopSignal::Hangup,
        }
    }
}

/// Installs a handler, unless the signal is ignored.
fn unless_ignored(kind: SignalKind) -> io::Result<Option<Signal>> {
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action, it only writes the present one into `now`.
    if unsafe { libc::sigaction(kind.as_raw_value(), ptr::null(), now.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: sigaction has succeeded, so it has written all of it.
    let now = unsafe { now.assume_init() };
    match now.sa_sigaction {
        libc::SIG_IGN => Ok(None),
        _ => signal(kind).map(Some),
    }
}

async fn received(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}
