//! The demonstration's VM.

use super::console::Console;
use super::show::Message;
use crate::serial::Serial;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Interval at which the guest's newest line is shown.
const GLANCE: Duration = Duration::from_millis(250);
/// Time limit of one step of a boot, in a lab on a busy machine.
const STEP: Duration = Duration::from_secs(300);

/// A VM in the foreground of `husk run --console`.
#[derive(Debug)]
pub struct Guest {
    run: Child,
    pub console: Console,
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
        let console = Console::new(keyboard, Serial::watch(run.stdout.take().context("no pipe")?));
        let notes = Serial::watch(run.stderr.take().context("no pipe")?);
        Ok(Self {
            run,
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
            let said = match self.console.output.poll(words, Instant::now() + GLANCE) {
                Ok(said) => said,
                // The output of `husk run` contains the reason.
                Err(error) => return Err(error.context(self.last_notes())),
            };
            if let Some((which, when)) = said {
                return Ok((which, (when - self.began).as_secs_f64()));
            }
            let line = self.console.output.last_line();
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
