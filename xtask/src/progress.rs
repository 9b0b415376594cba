//! Progress of a long step: a spinner with the newest line on a terminal, plain lines elsewhere.

use crate::lab::SignalSet;
use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::io::{BufRead, BufReader, IsTerminal};
use std::os::unix::process::CommandExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Lines kept from a failing command's output.
const TAIL: usize = 30;

/// Output of progress messages. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Progress {
    terminal: bool,
}

impl Progress {
    /// Reports on standard error: progress bars if it is a terminal, else plain lines.
    pub fn on_stderr() -> Self {
        Self {
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Starts a step named `what` ("building the lab image").
    pub fn step(&self, what: impl Into<String>) -> Step {
        let what = what.into();
        let bar = if self.terminal {
            let bar = ProgressBar::new_spinner();
            bar.set_style(
                ProgressStyle::with_template("{spinner} {prefix} [{elapsed}] {wide_msg:.dim}")
                    .unwrap_or_else(|_| ProgressStyle::default_spinner()),
            );
            bar.set_prefix(what.clone());
            bar.enable_steady_tick(Duration::from_millis(120));
            Some(bar)
        } else {
            eprintln!("{what} …");
            None
        };
        Step {
            what,
            bar,
            started: Instant::now(),
            cpu: AtomicU64::default(),
        }
    }

    /// Runs `command` as a step named `what`: its newest line is shown while it runs, its last
    /// lines are in the error if it fails. Returns its CPU time.
    pub fn run(&self, what: impl Into<String>, command: &mut Command) -> Result<Duration> {
        let step = self.step(what);
        step.command(command)?;
        let cpu = step.cpu();
        step.done();
        Ok(cpu)
    }
}

/// A step in progress. Dropped without [`Step::done`], it has failed.
#[derive(Debug)]
pub struct Step {
    what: String,
    bar: Option<ProgressBar>,
    started: Instant,
    /// CPU time of the step's completed commands, in microseconds.
    cpu: AtomicU64,
}

impl Step {
    /// Shows `line` as the newest line of this step (only on a terminal).
    pub fn news(&self, line: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(line.replace(char::is_control, " "));
        }
    }

    /// Prints `line` permanently.
    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }

    /// Runs `command` within this step, output merged, standard input closed.
    ///
    /// # Errors
    /// If it cannot start or exits other than with 0; the error ends with its last lines.
    pub fn command(&self, command: &mut Command) -> Result<()> {
        let name = command.get_program().to_string_lossy().into_owned();
        let (reader, writer) = std::io::pipe()?;
        command
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer);
        // It cannot go on writing where the next one starts.
        ends_with_this_process(command);
        let mut child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        // The command holds the pipe's write ends too. The reader ends when they are closed.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut tail = std::collections::VecDeque::new();
        for line in BufReader::new(reader).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).into_owned();
            self.news(&line);
            if tail.len() == TAIL {
                tail.pop_front();
            }
            tail.push_back(line);
        }
        let (status, cpu) = wait_with_cpu(&mut child)?;
        self.cpu
            .fetch_add(u64::try_from(cpu.as_micros())?, Ordering::Relaxed);
        if !status.success() {
            bail!("{}: {name}: {status}\n{}", self.what, Vec::from(tail).join("\n"));
        }
        Ok(())
    }

    fn cpu(&self) -> Duration {
        Duration::from_micros(self.cpu.load(Ordering::Relaxed))
    }

    /// Ends the step successfully and prints its duration.
    pub fn done(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        eprintln!(
            "{}: {:.1} s, CPU {:.1} s",
            self.what,
            self.started.elapsed().as_secs_f64(),
            self.cpu().as_secs_f64()
        );
    }
}

/// Makes `command` end with the thread that starts it, and so with this process.
pub fn ends_with_this_process(command: &mut Command) {
    // SAFETY: only async-signal-safe system calls.
    unsafe {
        command.pre_exec(|| {
            set_parent_process_death_signal(Some(Signal::TERM))?;
            // This process may have blocked the signals that it waits for, and a child inherits that.
            SignalSet::of(&[]).set_mask()
        });
    }
}

/// Waits for `child`; returns its status, and the user and system time of it and of the processes it has waited for.
pub fn wait_with_cpu(child: &mut Child) -> Result<(ExitStatus, Duration)> {
    let pid = libc::pid_t::try_from(child.id())?;
    let mut status = 0;
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // `Child` does not reap a process that it does not know to have ended, and nothing else may reap this one.
    loop {
        // SAFETY: both pointers are to live values of the right types.
        let reaped = unsafe { libc::wait4(pid, &mut status, 0, usage.as_mut_ptr()) };
        if reaped == pid {
            break;
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error).context("cannot wait for a command");
        }
    }
    // SAFETY: zeroed is a valid `rusage`, and wait4 has filled it.
    let usage = unsafe { usage.assume_init() };
    let time = |value: libc::timeval| {
        Duration::from_micros(u64::try_from(value.tv_sec * 1_000_000 + value.tv_usec).unwrap_or_default())
    };
    Ok((
        ExitStatus::from_raw(status),
        time(usage.ru_utime) + time(usage.ru_stime),
    ))
}
