//! Runs a command on this machine itself, as if it were the lab.

use super::run::{self, Command, Ended, Output, share};
use super::signals::{Disposition, Signals};
use crate::checkout;
use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, getpgrp, getpid, kill_process_group, setpgid};
use rustix::termios::{tcgetpgrp, tcsetpgrp};
use std::ffi::OsString;
use std::io::stdin;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::time::{Duration, Instant};

/// Maximum time that a command may take to end after a signal, before its process group is killed.
const KILL_AFTER: Duration = Duration::from_secs(5);

/// Runs `command` until it ends; returns its exit status.
pub fn run(command: &Command, output: &mut Output<'_>) -> Result<u8> {
    let (program, arguments) = command.words.split_first().context("no command")?;
    let mut path = OsString::from(checkout::release());
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let mut child = std::process::Command::new(program);
    child
        .args(arguments)
        .env("PATH", path)
        .env("HUSK_LAB_SHARE", share()?)
        .envs(command.env.iter().map(|(name, value)| (name, value)));
    let signals = Signals::take()?;
    let terminal = Terminal::lend();
    let in_front = terminal.is_some();
    signals.restore_in(&mut child);
    // A process group of its own, so that the command can be ended with all processes it started; in the terminal's
    // foreground, so that it can read there and receives the terminal's signals.
    // SAFETY: only async-signal-safe system calls, no allocation.
    unsafe {
        child.pre_exec(move || {
            setpgid(None, None)?;
            if in_front {
                take_foreground(getpid())?;
            }
            Ok(())
        });
    }
    let ended = run::attend(&mut child, command.timeout, &signals, output, &end)?;
    Ok(match ended {
        Ended::Of(status) => status,
        Ended::Itself(status) => {
            let code = status
                .code()
                .or_else(|| status.signal().map(|signal| 128 + signal));
            u8::try_from(code.unwrap_or(255)).unwrap_or(u8::MAX)
        }
    })
}

/// Sends `signal` to the process group of `leader`, and SIGKILL if the leader still runs some seconds later.
fn end(leader: Pid, signal: Signal) {
    let _ = kill_process_group(leader, signal);
    let deadline = Instant::now() + KILL_AFTER;
    while super::state::Process::running(leader.as_raw_pid()).is_some() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = kill_process_group(leader, Signal::KILL);
}

/// Makes the process group `group` the terminal's foreground group.
fn take_foreground(group: Pid) -> std::io::Result<()> {
    Disposition::Ignore.set(Signal::TTOU)?;
    let result = tcsetpgrp(stdin(), group);
    Disposition::Default.set(Signal::TTOU)?;
    Ok(result?)
}

/// Gives the terminal to a command, and takes it back when dropped.
#[derive(Debug)]
struct Terminal;

impl Terminal {
    /// `Some` if standard input is a terminal and this process is in its foreground.
    fn lend() -> Option<Self> {
        (tcgetpgrp(stdin()).ok()? == getpgrp()).then_some(Self)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A terminal that has closed needs no foreground group.
        let _ = take_foreground(getpgrp());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        Command::new(["sh", "-c", script])
    }

    #[test]
    fn statuses_pass_through() {
        let status = |script| run(&sh(script), &mut Output::Inherited).expect("runs");
        assert_eq!(status("exit 7"), 7);
        assert_eq!(status("exit 255"), 255);
        assert_eq!(status("kill -KILL $$"), 137);
        assert!(run(&Command::new(["/does/not/exist"]), &mut Output::Inherited).is_err());
    }

    #[test]
    fn output_arrives_whole() {
        let mut length = 0;
        let status = run(
            &sh("head -c 3000000 /dev/zero; exit 3"),
            &mut Output::Read(&mut |mut stdout| {
                length = std::io::copy(&mut stdout, &mut std::io::sink()).expect("read");
            }),
        );
        assert_eq!(status.expect("runs"), 3);
        assert_eq!(length, 3_000_000);
    }

    #[test]
    fn the_time_limit_ends_all_that_was_started() {
        let mut child = String::new();
        let command = sh("sleep 1000 & echo $!; exec >/dev/null; wait").timeout(Duration::from_millis(300));
        let started = Instant::now();
        let status = run(
            &command,
            &mut Output::Read(&mut |stdout| {
                child = std::io::read_to_string(std::io::BufReader::new(stdout)).expect("read");
            }),
        );
        assert_eq!(status.expect("runs"), run::TIMED_OUT);
        assert!(started.elapsed() < Duration::from_secs(30));
        let child = child.trim().parse().expect("a pid");
        let deadline = Instant::now() + Duration::from_secs(5);
        while super::super::state::Process::running(child).is_some() {
            assert!(Instant::now() < deadline, "{child} still runs");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
