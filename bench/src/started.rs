//! A running VMM, its guest's serial line and its cost.

use super::group::Group;
use super::guest::Vmm;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use xtask::serial::Serial;

/// Line of a guest's script that cannot measure.
const FAILED: &str = "husk-bench: failed;";
/// Interval between attempts to reach a VMM that starts.
const RETRY: Duration = Duration::from_millis(2);

/// A VMM, its guest and the time limit; all processes are ended when this is dropped.
#[derive(Debug)]
pub struct Started {
    child: Child,
    stop: Option<Command>,
    errors: PathBuf,
    /// All processes of the VMM.
    pub group: Group,
    /// Output of the guest.
    pub serial: Serial,
    /// Time just before the VMM's program was started.
    pub began: Instant,
    /// End of the time limit.
    deadline: Instant,
}

impl Started {
    /// Starts a guest, with `timeout` as the time limit of all waits together.
    pub fn start(vmm: Vmm, timeout: Duration) -> Result<Self> {
        let Vmm {
            mut command,
            stop,
            errors,
        } = vmm;
        let group = Group::new()?;
        group.hold(&mut command)?;
        let log = File::create(&errors)?;
        command.stdout(Stdio::piped()).stderr(log);
        let began = Instant::now();
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let stdout = child.stdout.take().context("no pipe")?;
        Ok(Self {
            child,
            stop,
            errors,
            group,
            serial: Serial::watch(stdout),
            began,
            deadline: began + timeout,
        })
    }

    /// Waits until the guest prints `words`.
    pub fn until(&mut self, words: &str) -> Result<Instant> {
        self.first_of(&[words]).map(|(_, when)| when)
    }

    /// Waits until the guest prints the first of several texts; returns its index and time.
    ///
    /// # Errors
    /// If it does not in time, or ends; with the VMM's errors.
    pub fn first_of(&mut self, words: &[&str]) -> Result<(usize, Instant)> {
        match self.serial.poll(words, self.deadline) {
            Ok(Some(found)) => Ok(found),
            Ok(None) => bail!(
                "the guest did not say {words:?} in time; its last line: {}",
                self.serial.last_line()
            ),
            Err(error) => {
                let errors = std::fs::read_to_string(&self.errors).unwrap_or_default();
                Err(match errors.trim() {
                    "" => error,
                    errors => error.context(errors.to_owned()),
                })
            }
        }
    }

    /// Waits until the guest's script prints `words`.
    ///
    /// # Errors
    /// Also if it says that it cannot measure.
    pub fn until_script(&mut self, words: &str) -> Result<Instant> {
        match self.first_of(&[words, FAILED])? {
            (0, when) => Ok(when),
            _ => bail!("the guest cannot measure: {}", self.serial.said()),
        }
    }

    /// Waits until the command has ended with status 0; its VM may run on.
    ///
    /// # Errors
    /// With the command's errors, if it ends otherwise, or not in time.
    pub fn returned(&mut self) -> Result<()> {
        while !self.has_returned()? {
            ensure!(Instant::now() < self.deadline, "the command does not end");
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// True if the command has ended with status 0.
    ///
    /// # Errors
    /// With the command's errors, if it has ended otherwise.
    pub fn has_returned(&mut self) -> Result<bool> {
        let Some(status) = self.child.try_wait()? else {
            return Ok(false);
        };
        let errors = || std::fs::read_to_string(&self.errors).unwrap_or_default();
        ensure!(status.success(), "it ended with {status}: {}", errors().trim());
        Ok(true)
    }

    /// Connects to a socket of the VMM, which may be starting.
    ///
    /// # Errors
    /// If it cannot be reached in time, or the command fails; with its errors.
    pub fn reached<T>(&mut self, socket: &Path, connect: impl Fn(&Path) -> Result<T>) -> Result<T> {
        loop {
            self.has_returned()?;
            let error = match socket.exists().then(|| connect(socket)) {
                Some(Ok(connected)) => return Ok(connected),
                Some(Err(error)) => Some(error),
                None => None,
            };
            if Instant::now() >= self.deadline {
                match error {
                    Some(error) => return Err(error),
                    None => bail!("there is no {}", socket.display()),
                }
            }
            std::thread::sleep(RETRY);
        }
    }

    /// End of the time limit.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Waits for the guest's end; returns the time since the start.
    ///
    /// # Errors
    /// If the VMM and its descendants do not end by themselves, with status 0.
    pub fn ended(&mut self) -> Result<Duration> {
        self.serial.wait_for_end(self.deadline)?;
        // The VMM exits moments after its output has ended.
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            ensure!(
                Instant::now() < self.deadline,
                "it closed its output but does not end"
            );
            std::thread::sleep(Duration::from_micros(200));
        };
        let took = self.began.elapsed();
        ensure!(status.success(), "it ended with {status}");
        self.group.wait_until_empty(self.deadline)?;
        Ok(took)
    }

    /// The process that was started.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The processes that run as long as the guest, besides `vmm`: without the command that the user runs.
    pub fn companions(&self, vmm: u32) -> Result<Vec<u32>> {
        let mut pids = self.group.pids()?;
        pids.retain(|pid| *pid != vmm && *pid != self.pid());
        Ok(pids)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // The command may have ended and its VM not.
        let runs = matches!(self.child.try_wait(), Ok(None));
        if runs || self.group.pids().is_ok_and(|pids| !pids.is_empty()) {
            if let Some(stop) = &mut self.stop {
                let _ = stop.status();
            }
            let _ = self.group.kill();
            let _ = self.child.wait();
        }
    }
}

/// A time in milliseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
