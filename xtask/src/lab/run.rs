//! Runs a command in the lab, or on this machine where guests run natively.

use super::remote::Remote;
use super::signals::Signals;
use super::state::{Lab, LabFolder};
use super::{boot, local};
use crate::checkout;
use crate::native::native_kvm;
use crate::progress::Progress;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Exit status of a command that was ended at its time limit.
pub const TIMED_OUT: u8 = 124;

/// Maximum time that a command may take to end after a signal before this process kills its ssh.
pub const GRACE: Duration = Duration::from_secs(20);

/// The folder that lab 1 and the host can write, at the same path in both: `target/lab/share`.
pub fn share() -> Result<PathBuf> {
    share_of(1)
}

/// The shared folder of lab `number`.
pub(super) fn share_of(number: u32) -> Result<PathBuf> {
    let name = match number {
        1 => "lab/share".to_owned(),
        _ => format!("lab/share-{number}"),
    };
    checkout::folder(checkout::target().join(name))
}

/// A command to run as root in the lab, or as this user where guests run natively.
///
/// It runs in this process's working folder if that is within the checkout or the cache, else in the share. Its PATH
/// begins with this checkout's release binaries. It gets `HUSK_LAB_SHARE`, `HUSK_IMAGES`, and this process's `HUSK_*`,
/// `RUST_LOG` and `RUST_BACKTRACE`.
#[derive(Debug, Clone)]
pub struct Command {
    pub(super) words: Vec<String>,
    /// Additional environment variables.
    pub env: Vec<(String, String)>,
    /// Time limit, after which the command is ended with status 124.
    pub timeout: Option<Duration>,
    /// True if the command gets a terminal.
    pub tty: bool,
    in_lab: bool,
    /// Number of the lab that the command runs in.
    pub lab: u32,
}

impl Command {
    /// A command with these arguments, without a shell.
    pub fn new<S: Into<String>>(words: impl IntoIterator<Item = S>) -> Self {
        Self {
            words: words.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            timeout: None,
            tty: false,
            in_lab: false,
            lab: 1,
        }
    }

    /// Runs it in the lab even where guests run natively: it needs programs in versions that this machine may not have.
    pub fn in_lab(mut self, needed: bool) -> Self {
        self.in_lab = needed;
        self
    }

    /// Ends the command after `limit`, with status 124.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    /// Runs the command until it ends, and boots the lab if needed. Returns its exit status, 128 + N if signal N ended
    /// it.
    ///
    /// The command uses this process's input, output and errors. SIGINT, SIGTERM and SIGHUP to this process end it.
    ///
    /// # Errors
    /// If the command could not be run, or the lab was lost while it ran.
    pub fn status(&self, progress: &Progress) -> Result<u8> {
        self.run(progress, &mut Output::Inherited)
    }

    /// Like [`Command::status`] without input, and passes each line of its output to `line` as it arrives.
    pub fn lines(&self, progress: &Progress, mut line: impl FnMut(&str) + Send) -> Result<u8> {
        self.run(
            progress,
            &mut Output::Read(&mut |stdout| {
                for bytes in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                    line(String::from_utf8_lossy(&bytes).trim_end_matches('\r'));
                }
            }),
        )
    }

    fn run(&self, progress: &Progress, output: &mut Output<'_>) -> Result<u8> {
        if self.words.is_empty() {
            bail!("no command");
        }
        if native_kvm() && !self.in_lab {
            return local::run(self, output);
        }
        let dir = LabFolder::find(self.lab)?;
        let _user = dir.enter()?;
        // The usual case needs one connection: the lab is checked more closely only after a failure.
        if let Some(lab) = boot::running(&dir)
            && let Some(status) = self.run_in(&dir, &lab, output)?
        {
            return Ok(status);
        }
        let lab = boot::up(progress, self.lab)?;
        self.run_in(&dir, &lab, output)?
            .context("the lab answers, but does not start commands")
    }

    /// Runs it in `lab`; returns nothing if it did not start.
    fn run_in(&self, dir: &LabFolder, lab: &Lab, output: &mut Output<'_>) -> Result<Option<u8>> {
        let signals = Signals::take()?;
        let remote = Remote::new(dir, lab)?;
        let mut ssh = remote.ssh(self)?;
        signals.ignore_in(&mut ssh);
        let status = match attend(&mut ssh, self.timeout, &signals, output, &|_, signal| {
            remote.signal(signal)
        })? {
            Ended::Of(status) => return Ok(Some(status)),
            Ended::Itself(status) => status,
        };
        match status.code() {
            // Either ssh's own failure or the command's status.
            Some(255) | None => remote.status(),
            Some(code) => Ok(Some(u8::try_from(code).unwrap_or(u8::MAX))),
        }
    }
}

/// Destination of a command's output.
#[allow(missing_debug_implementations)]
pub enum Output<'a> {
    /// This process's own output.
    Inherited,
    /// This reader, which reads until the end.
    Read(&'a mut (dyn FnMut(ChildStdout) + Send)),
}

/// Reason for a command's end.
#[derive(Debug)]
pub enum Ended {
    /// The command ended by itself.
    Itself(ExitStatus),
    /// This process ended it, which this status stands for.
    Of(u8),
}

/// Starts `command` and waits for it. A signal to this process or the time limit makes `end` end it.
pub fn attend(
    command: &mut std::process::Command,
    timeout: Option<Duration>,
    signals: &Signals,
    output: &mut Output<'_>,
    end: &dyn Fn(Pid, Signal),
) -> Result<Ended> {
    if let Output::Read(_) = output {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
    }
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))?;
    let stdout = child.stdout.take();
    std::thread::scope(|scope| {
        if let (Output::Read(read), Some(stdout)) = (output, stdout) {
            scope.spawn(move || read(stdout));
        }
        wait(&mut child, timeout, signals, end)
    })
}

fn wait(
    child: &mut Child,
    timeout: Option<Duration>,
    signals: &Signals,
    end: &dyn Fn(Pid, Signal),
) -> Result<Ended> {
    let limit = timeout.map(|timeout| Instant::now() + timeout);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Ended::Itself(status));
        }
        let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
        let (signal, status) = if left == Some(Duration::ZERO) {
            (Signal::TERM, TIMED_OUT)
        } else {
            let nap = left.unwrap_or(Duration::MAX).min(Duration::from_millis(500));
            match signals.wait(nap)? {
                Some(Signal::CHILD) | None => continue,
                Some(signal) => (signal, 128 + u8::try_from(signal.as_raw())?),
            }
        };
        end(Pid::from_child(child), signal);
        return Ok(match reap(child) {
            // The command may handle the signal.
            Some(own) if status != TIMED_OUT => Ended::Itself(own),
            _ => Ended::Of(status),
        });
    }
}

/// Gives an ended command time to write its last output, then kills it; returns its status if it ended by itself.
fn reap(child: &mut Child) -> Option<ExitStatus> {
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}
