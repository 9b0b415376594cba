//! A VMM that was started, its guest's serial line and what it has cost.

use super::case::{Kit, Source, Vmm};
use crate::bench::group::Group;
use crate::serial::Serial;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// A VMM, its guest and the time; dropped, all of it is ended.
#[derive(Debug)]
pub struct Started<'a> {
    vmm: Vmm,
    kit: &'a Kit,
    child: Child,
    group: Group,
    /// What the guest says.
    pub serial: Serial,
    /// Just before the VMM's program was started.
    pub began: Instant,
    /// When patience ends.
    pub deadline: Instant,
}

impl<'a> Started<'a> {
    /// Starts a guest, which has until `patience` for all that is waited for.
    pub fn start(vmm: Vmm, kit: &'a Kit, source: Source<'_>, patience: Duration) -> Result<Self> {
        let mut command = vmm.command(kit, source)?;
        let group = Group::new()?;
        group.hold(&mut command)?;
        let log = File::create(kit.folder.join("errors"))?;
        command.stdout(Stdio::piped()).stderr(log);
        let began = Instant::now();
        let mut child = command.spawn().with_context(|| format!("cannot start {vmm:?}"))?;
        let stdout = child.stdout.take().context("no pipe")?;
        Ok(Self {
            vmm,
            kit,
            child,
            group,
            serial: Serial::watch(stdout),
            began,
            deadline: began + patience,
        })
    }

    /// Milliseconds from the start until the guest says `words`.
    pub fn until(&mut self, words: &str) -> Result<f64> {
        match self.serial.wait_for(words, self.deadline) {
            Ok(said) => Ok(milliseconds(said - self.began)),
            Err(error) => {
                let errors = std::fs::read_to_string(self.kit.folder.join("errors")).unwrap_or_default();
                let errors = errors.trim();
                Err(if errors.is_empty() {
                    error
                } else {
                    error.context(errors.to_owned())
                })
            }
        }
    }

    /// Milliseconds from the start until the VMM's program has ended, and those of processor time that all it
    /// started has taken.
    ///
    /// # Errors
    /// If it does not end by itself, with status 0 and all it started.
    pub fn ended(&mut self) -> Result<(f64, f64)> {
        self.serial.wait_for_end(self.deadline)?;
        // The end of its output is the end of it, but for moments.
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() >= self.deadline {
                bail!("it closed its output but does not end");
            }
            std::thread::sleep(Duration::from_micros(200));
        };
        let took = milliseconds(self.began.elapsed());
        ensure!(status.success(), "it ended with {status}");
        self.group.wait_until_empty(self.deadline)?;
        Ok((took, milliseconds(self.group.cpu()?)))
    }

    /// The process that holds the guest's memory.
    pub fn vmm_pid(&self) -> Result<u32> {
        match self.vmm {
            Vmm::Husk => self.group.find("husk-vmm"),
            Vmm::Microvm | Vmm::Q35 => Ok(self.child.id()),
        }
    }

    /// The other processes that live as long as the guest, without the command its user runs.
    pub fn companions(&self) -> Result<Vec<u32>> {
        let vmm = self.vmm_pid()?;
        let mut pids = self.group.pids()?;
        pids.retain(|pid| *pid != vmm && *pid != self.child.id());
        Ok(pids)
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.vmm.end(self.kit);
            let _ = self.group.kill();
            let _ = self.child.wait();
        }
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
