//! Checks for things that must not outlive a pod: processes, sockets, mounts, cgroups, state.

use super::{Containerd, NAMESPACE};
use crate::harness::context::files_in;
use crate::harness::processes::Process;
use crate::harness::{met, poll};
use anyhow::Result;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Folder of the sockets of containerd's shims.
const SOCKETS: &str = "/run/containerd/s";
/// Time limit for things that disappear by themselves.
const GOING: Duration = Duration::from_secs(15);

/// The processes of the program `name`.
pub fn called(name: &str) -> Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let pid = entry.file_name().to_str().and_then(|pid| pid.parse().ok());
        if let Some(process) = pid.and_then(Process::read).filter(Process::runs) {
            let program = process.command.split(' ').next().unwrap_or_default();
            if Path::new(program).file_name().is_some_and(|file| file == name) {
                found.push(process);
            }
        }
    }
    Ok(found)
}

impl Containerd<'_> {
    /// Waits until no leftovers of any VM exist.
    ///
    /// # Errors
    /// With a list of all leftovers.
    pub fn nothing_left(&self) -> Result<()> {
        poll(GOING, Duration::from_millis(200), || {
            let left = self.leftovers()?;
            met(left.is_empty(), || format!("left behind: {}", left.join("; ")))
        })
    }

    pub(super) fn leftovers(&self) -> Result<Vec<String>> {
        let mut left = Vec::new();
        for name in ["containerd-shim-husk-v2", "husk-vmm"] {
            let processes = called(name)?;
            left.extend(
                processes
                    .iter()
                    .map(|process| format!("{} {}", process.pid, process.command)),
            );
        }
        let tasks = self.state().join("io.containerd.runtime.v2.task").join(NAMESPACE);
        let pods = self.ctx().runtime_dir().join("pods");
        let cgroups = Path::new("/sys/fs/cgroup").join(NAMESPACE);
        for folder in [Path::new(SOCKETS), &tasks, &pods] {
            left.extend(files_in(folder).iter().map(|path| path.display().to_string()));
        }
        let folders = files_in(&cgroups).into_iter().filter(|path| path.is_dir());
        left.extend(folders.map(|path| path.display().to_string()));
        let table = fs::read_to_string("/proc/self/mountinfo")?;
        let own = tasks.display().to_string();
        left.extend(
            table
                .lines()
                .filter(|line| line.contains(&own))
                .map(str::to_owned),
        );
        left.retain(|what| !self.before.contains(what));
        Ok(left)
    }
}
