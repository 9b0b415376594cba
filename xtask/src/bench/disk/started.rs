//! A VMM that was started, its guest's serial line and what it has cost.

use super::case::{Case, Kit};
use crate::bench::group::Group;
use crate::serial::Serial;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Why a case cannot be measured, in the VMM's words. An error that no second try changes.
#[derive(Debug)]
pub struct Absent(pub String);

impl std::fmt::Display for Absent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Absent {}

/// A VMM, its guest and the time; dropped, all of it is ended.
#[derive(Debug)]
pub struct Started<'a> {
    case: Case,
    kit: &'a Kit,
    child: Child,
    group: Group,
    serial: Serial,
    deadline: Instant,
}

impl<'a> Started<'a> {
    /// Starts a guest, which has until `patience` for all that is waited for.
    pub fn start(case: Case, kit: &'a Kit, patience: Duration) -> Result<Self> {
        let mut command = case.command(kit)?;
        let group = Group::new()?;
        group.hold(&mut command)?;
        let log = File::create(kit.folder.join("errors"))?;
        command.stdout(Stdio::piped()).stderr(log);
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {case:?}"))?;
        let stdout = child.stdout.take().context("no pipe")?;
        Ok(Self {
            case,
            kit,
            child,
            group,
            serial: Serial::watch(stdout),
            deadline: Instant::now() + patience,
        })
    }

    /// Waits until the guest says `words`: when, and what it said since what was waited for before.
    ///
    /// # Errors
    /// [`Absent`] if the VMM says that it does not serve such a guest.
    pub fn until(&mut self, words: &str) -> Result<(Instant, String)> {
        const FAILED: &str = "husk-bench: failed;";
        match self.serial.poll(&[words, FAILED], self.deadline) {
            Ok(Some((0, when))) => Ok((when, self.serial.said())),
            Ok(Some(_)) => bail!("the guest cannot measure: {}", self.serial.said()),
            Ok(None) => bail!(
                "the guest did not say {words:?} in time; its last line: {}",
                self.serial.last_line()
            ),
            Err(error) => {
                let errors = std::fs::read_to_string(self.kit.folder.join("errors")).unwrap_or_default();
                Err(match (unserved(&errors), errors.trim()) {
                    (Some(why), _) => Absent(why.to_owned()).into(),
                    (None, "") => error,
                    (None, errors) => error.context(errors.to_owned()),
                })
            }
        }
    }

    /// Processor time that the VMM and all it started have taken, their guest's included.
    pub fn cpu(&self) -> Result<Duration> {
        self.group.cpu()
    }

    /// The guest's part of it.
    pub fn guest_cpu(&self) -> Result<Duration> {
        self.group.guest()
    }

    /// Waits for the guest's end.
    ///
    /// # Errors
    /// If the VMM does not end by itself, with status 0 and all it started.
    pub fn ended(&mut self) -> Result<()> {
        self.serial.wait_for_end(self.deadline)?;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            ensure!(
                Instant::now() < self.deadline,
                "it closed its output but does not end"
            );
            std::thread::sleep(Duration::from_millis(5));
        };
        ensure!(status.success(), "it ended with {status}");
        self.group.wait_until_empty(self.deadline)
    }
}

/// The line that says that something is not there in this VMM, as opposed to broken.
fn unserved(errors: &str) -> Option<&str> {
    let says = |line: &&str| line.contains("not served yet") || line.contains("not supported in this build");
    errors.lines().find(says).map(str::trim)
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.case.end(self.kit);
            let _ = self.group.kill();
            let _ = self.child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_told_from_what_is_broken() {
        let note = "a note\nerror: bench-disk: disk \"data\": SCSI disks (bus scsi) are not served yet: use virtio\n";
        assert_eq!(
            unserved(note),
            Some("error: bench-disk: disk \"data\": SCSI disks (bus scsi) are not served yet: use virtio")
        );
        assert_eq!(unserved("error: bench-disk: the VMM died: SIGSEGV"), None);
        assert_eq!(unserved(""), None);
    }
}
