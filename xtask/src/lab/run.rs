//! Running a command in the lab, or on this machine where guests run natively.

use super::boot;
use super::ssh;
use super::state::{Lab, Place};
use crate::checkout;
use crate::native::native_kvm;
use crate::progress::Progress;
use crate::shell;
use anyhow::{Context, Result, bail};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Exit status of a command ended by its time limit.
const TIMED_OUT: u8 = 124;

/// How long an ended command may take to end before it is killed, seen from here.
const GRACE: Duration = Duration::from_secs(20);

/// The folder that can be written on both sides, at the same path: `target/lab/share`.
pub fn folder() -> Result<PathBuf> {
    checkout::folder(checkout::target().join("lab/share"))
}

/// A command to run as root in the lab.
#[derive(Debug)]
pub struct Command {
    words: Vec<String>,
    /// Environment beside PATH, HUSK_LAB_SHARE, and HUSK_* and RUST_* of this process.
    pub env: Vec<(String, String)>,
    /// Ends it after that time.
    pub timeout: Option<Duration>,
    /// Gives it a terminal.
    pub tty: bool,
    /// Where its output goes; this process's own if none.
    pub stdout: Option<Stdio>,
}

impl Command {
    /// The command of these words.
    pub fn new<S: Into<String>>(words: impl IntoIterator<Item = S>) -> Self {
        Self {
            words: words.into_iter().map(Into::into).collect(),
            env: Vec::new(),
            timeout: None,
            tty: false,
            stdout: None,
        }
    }

    /// Runs it to its end, booting the lab if needed.
    ///
    /// Input, output and errors are this process's own. SIGINT, SIGTERM and SIGHUP to this process end it.
    ///
    /// # Errors
    /// If it could not be run, or the lab was lost under it.
    pub fn status(mut self, progress: &Progress) -> Result<u8> {
        if native_kvm() {
            return self.here();
        }
        let place = Place::find()?;
        let _user = place.enter()?;
        let lab = boot::up(progress)?;
        let signals = Signals::take()?;
        let id = format!("{}-{}", std::process::id(), uuid());
        let mut ssh = ssh::command(&place, lab.port);
        if self.tty {
            ssh.arg("-tt");
        }
        ssh.arg(self.remote(&id)?);
        if let Some(stdout) = self.stdout.take() {
            ssh.stdout(stdout);
        }
        let mut child = signals.spawn(&mut ssh).context("cannot start ssh")?;
        let remote = Remote {
            place: &place,
            lab: &lab,
            id,
        };
        let status = match self.wait(&mut child, &signals, &remote)? {
            Ended::TimedOut => return Ok(TIMED_OUT),
            Ended::Signalled(signal) => return Ok(128 + u8::try_from(signal as i32)?),
            Ended::Itself(status) => status,
        };
        match status.code() {
            // ssh's own failure, or the command's status.
            Some(255) | None => remote.status(),
            Some(code) => Ok(u8::try_from(code).unwrap_or(u8::MAX)),
        }
    }

    /// The shell command for sshd.
    fn remote(&self, id: &str) -> Result<String> {
        let script = checkout::root().join("xtask/src/lab/guest/run.sh");
        let here = std::env::current_dir().unwrap_or_else(|_| checkout::root().into());
        let share = folder()?;
        let path = format!(
            "PATH={}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            checkout::release().display()
        );
        let mut words = vec!["exec".to_owned(), "env".into(), shell::quote(&path)];
        words.push(shell::quote(&format!("HUSK_LAB_SHARE={}", share.display())));
        let own = std::env::vars().filter(|(name, _)| name.starts_with("HUSK_") || name.starts_with("RUST_"));
        let terminal = std::env::vars().filter(|(name, _)| self.tty && name == "TERM");
        for (name, value) in own.chain(terminal).chain(self.env.iter().cloned()) {
            words.push(shell::quote(&format!("{name}={value}")));
        }
        words.push("sh".into());
        words.push(shell::join([
            script.to_string_lossy().as_ref(),
            id,
            share.to_string_lossy().as_ref(),
            here.to_string_lossy().as_ref(),
        ]));
        words.push(shell::join(&self.words));
        Ok(words.join(" "))
    }

    /// Waits for `child`; a signal to this process or the time limit ends the command.
    fn wait(&self, child: &mut Child, signals: &Signals, remote: &Remote<'_>) -> Result<Ended> {
        let limit = self.timeout.map(|timeout| Instant::now() + timeout);
        loop {
            if let Some(status) = child.try_wait()? {
                return Ok(Ended::Itself(status));
            }
            let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                remote.signal(Signal::SIGTERM);
                reap(child);
                return Ok(Ended::TimedOut);
            }
            let nap = left.unwrap_or(Duration::MAX).min(Duration::from_millis(500));
            match signals.wait(nap)? {
                Some(Signal::SIGCHLD) | None => {}
                Some(signal) => {
                    remote.signal(signal);
                    reap(child);
                    return Ok(Ended::Signalled(signal));
                }
            }
        }
    }

    /// Runs it on this machine.
    fn here(mut self) -> Result<u8> {
        let Some((program, arguments)) = self.words.split_first() else {
            bail!("no command");
        };
        let mut path = OsString::from(checkout::release());
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let signals = Signals::take()?;
        let mut command = std::process::Command::new(program);
        command
            .args(arguments)
            .env("PATH", path)
            .env("HUSK_LAB_SHARE", folder()?)
            .envs(self.env.drain(..));
        if let Some(stdout) = self.stdout.take() {
            command.stdout(stdout);
        }
        let _ = (command, signals);
        bail!("running natively is not there yet")
    }
}

/// How waiting for a command came to its end.
#[derive(Debug)]
enum Ended {
    Itself(ExitStatus),
    TimedOut,
    Signalled(Signal),
}

/// Gives an ended command's ssh time to bring its last output, then kills it.
fn reap(child: &mut Child) {
    let deadline = Instant::now() + GRACE;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// A command in the lab, known by its id.
#[derive(Debug)]
struct Remote<'a> {
    place: &'a Place,
    lab: &'a Lab,
    id: String,
}

impl Remote<'_> {
    /// Sends the command `signal`, and SIGKILL if that does not end it within seconds.
    fn signal(&self, signal: Signal) {
        let script = checkout::root().join("xtask/src/lab/guest/signal.sh");
        let name = signal.as_str().trim_start_matches("SIG");
        let words = shell::join(["sh", script.to_string_lossy().as_ref(), &self.id, name]);
        ssh::quietly(self.place, self.lab.port, &words, GRACE);
    }

    /// Its exit status as recorded in the lab.
    fn status(&self) -> Result<u8> {
        let ask = format!("cat /run/husk-lab/runs/{}/status", self.id);
        let answer = ssh::quietly(self.place, self.lab.port, &ask, boot::HUNG);
        answer
            .filter(|(status, _)| *status == Some(0))
            .and_then(|(_, status)| status.trim().parse().ok())
            .context("the connection to the lab was lost; the next command boots it again if it is dead")
    }
}

/// The signals that end a command, taken by this thread alone instead of killing the process.
#[derive(Debug)]
struct Signals {
    set: SigSet,
}

impl Signals {
    fn take() -> Result<Self> {
        let mut set = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD] {
            set.add(signal);
        }
        set.thread_block()?;
        Ok(Self { set })
    }

    /// Starts `command` deaf to the terminal's signals, which come through us, and to end with this process.
    fn spawn(&self, command: &mut std::process::Command) -> std::io::Result<Child> {
        let set = self.set;
        // SAFETY: only async-signal-safe system calls, no allocation.
        unsafe {
            command.pre_exec(move || {
                for ignored in [Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
                    signal(ignored, SigHandler::SigIgn)?;
                }
                set.thread_unblock()?;
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                Ok(())
            });
        }
        command.spawn()
    }

    /// The next signal within `limit`.
    fn wait(&self, limit: Duration) -> Result<Option<Signal>> {
        let limit = libc::timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        // SAFETY: both pointers are to live values of the right types; no information is asked for.
        let number = unsafe { libc::sigtimedwait(self.set.as_ref(), std::ptr::null_mut(), &limit) };
        if number < 0 {
            return match nix::errno::Errno::last() {
                nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR => Ok(None),
                error => Err(error.into()),
            };
        }
        Ok(Some(Signal::try_from(number)?))
    }
}

/// A root shell with a terminal.
pub fn shell(progress: &Progress) -> Result<ExitCode> {
    let mut shell = Command::new(["bash", "-l"]);
    shell.tty = true;
    Ok(ExitCode::from(shell.status(progress)?))
}

fn uuid() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| u64::from(time.subsec_nanos()))
}
