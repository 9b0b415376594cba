//! The demonstration's VM: its console, and a shell on it.

use super::show::Message;
use crate::serial::Serial;
use anyhow::{Context, Result, bail};
use std::io::Write;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Interval at which the guest's newest line is shown.
const GLANCE: Duration = Duration::from_millis(250);
/// Time limit of one step of a boot, in a lab on a busy machine.
const STEP: Duration = Duration::from_secs(300);
/// Time limit of the guest's reply to one line of input.
const ANSWER: Duration = Duration::from_secs(60);

/// A VM in the foreground of `husk run --console`.
#[derive(Debug)]
pub struct Guest {
    run: Child,
    keyboard: ChildStdin,
    /// Serial output of the guest.
    pub console: Serial,
    /// Output of `husk run`.
    pub notes: Serial,
    /// Start of the VM's clock.
    pub began: Instant,
}

impl Guest {
    /// Starts the VM from `manifest` with `disk` as its root disk.
    pub fn start(manifest: &Path, disk: &Path) -> Result<Self> {
        let mut command = Command::new("husk");
        command.arg("run").arg(manifest).arg("--volume");
        command
            .arg(format!("rootdisk={}", disk.display()))
            .arg("--console");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let began = Instant::now();
        let mut run = command.spawn().context("cannot start husk")?;
        let keyboard = run.stdin.take().context("no pipe")?;
        let console = Serial::watch(run.stdout.take().context("no pipe")?);
        let notes = Serial::watch(run.stderr.take().context("no pipe")?);
        Ok(Self {
            run,
            keyboard,
            console,
            notes,
            began,
        })
    }

    /// Waits until the guest prints one of `words`, and shows its output meanwhile. Returns the index and the seconds
    /// since the start.
    pub fn until(&mut self, words: &[&str]) -> Result<(usize, f64)> {
        let deadline = Instant::now() + STEP;
        let mut shown = String::new();
        while Instant::now() < deadline {
            let said = match self.console.poll(words, Instant::now() + GLANCE) {
                Ok(said) => said,
                // The output of `husk run` contains the reason.
                Err(error) => return Err(error.context(self.last_notes())),
            };
            if let Some((which, when)) = said {
                return Ok((which, (when - self.began).as_secs_f64()));
            }
            let line = self.console.last_line();
            if line != shown {
                Message::News(line.clone()).tell();
                shown = line;
            }
        }
        bail!(
            "the guest did not say {words:?} within {} s; last: {shown}",
            STEP.as_secs()
        )
    }

    /// The rest of the current line.
    pub fn rest_of_line(&mut self) -> Result<String> {
        self.console.wait_for("\n", Instant::now() + ANSWER)?;
        let line = self.console.said();
        Ok(line.trim().to_owned())
    }

    /// Types a line.
    pub fn type_line(&mut self, line: &str) -> Result<()> {
        writeln!(self.keyboard, "{line}").context("the console does not take input")
    }

    /// Logs in at a login prompt.
    pub fn log_in(&mut self, user: &str, password: &str) -> Result<()> {
        // Other output may follow the prompt: request a fresh one.
        self.type_line("")?;
        let soon = Instant::now() + ANSWER;
        self.console.wait_for("login: ", soon)?;
        self.type_line(user)?;
        self.console.wait_for("Password: ", soon)?;
        self.type_line(password)?;
        self.console.wait_for("$ ", soon)?;
        // Without echo and prompt, all output is the command's. The terminal's width is set as well.
        self.type_line("PS1=; PS2=; stty -echo cols 100; export LC_ALL=C.UTF-8; echo rea''dy")?;
        self.console.wait_for("ready\r\n", soon)?;
        Ok(())
    }

    /// Runs a shell command in the guest; returns its output.
    pub fn run(&mut self, command: &str) -> Result<String> {
        self.type_line(&format!("echo beg''in; {{ {command}; }} 2>&1; echo en''d"))?;
        let soon = Instant::now() + ANSWER;
        self.console.wait_for("begin\r\n", soon)?;
        self.console.wait_for("end\r\n", soon)?;
        Ok(self.console.said())
    }

    /// Waits until `husk run` has ended.
    pub fn wait(mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.run.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!("husk run does not end");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn last_notes(&mut self) -> String {
        let _ = self.notes.wait_for_end(Instant::now() + Duration::from_secs(5));
        self.notes.rest()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if matches!(self.run.try_wait(), Ok(None)) {
            let _ = Command::new("husk").args(["stop", "--force", "demo"]).status();
            let _ = self.run.kill();
            let _ = self.run.wait();
        }
    }
}
