//! The cgroups of pods, which the kubelet makes by one of its two drivers before the runtime makes those of containers.

use super::{PAUSE, met, poll};
use crate::finish::finish;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Parent cgroup of all pods.
const ALL: &str = "husk-e2e";
/// The same as a slice; a dash in its name would mean a nested slice.
pub const ALL_SLICES: &str = "husk_e2e.slice";
/// Time limit for systemd to notice that a scope is empty.
const GOING: Duration = Duration::from_secs(15);

/// The kubelet's `cgroupDriver`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cgroups {
    /// The driver `cgroupfs`.
    Files,
    /// The driver `systemd`.
    Systemd,
}

/// The cgroup of one pod.
#[derive(Debug, Clone)]
pub struct PodCgroup {
    parent: PathBuf,
    /// Name of the systemd unit.
    slice: Option<String>,
}

impl Cgroups {
    /// Creates the cgroup of the pod with this UID.
    pub fn make(self, uid: &str) -> Result<PodCgroup> {
        match self {
            Self::Files => {
                let cgroup = PodCgroup {
                    parent: PathBuf::from(format!("/{ALL}/pod{uid}")),
                    slice: None,
                };
                std::fs::create_dir_all(cgroup.path())?;
                Ok(cgroup)
            }
            Self::Systemd => {
                let slice = format!("husk_e2e-pod{}.slice", uid.replace('-', "_"));
                systemctl(&["start", &slice])?;
                Ok(PodCgroup {
                    parent: Path::new("/").join(ALL_SLICES).join(&slice),
                    slice: Some(slice),
                })
            }
        }
    }
}

impl PodCgroup {
    /// Path of the cgroup in CRI's requests.
    pub fn parent(&self) -> &Path {
        &self.parent
    }

    /// Directory of the cgroup.
    pub fn path(&self) -> PathBuf {
        let relative = self.parent.strip_prefix("/").unwrap_or(&self.parent);
        Path::new("/sys/fs/cgroup").join(relative)
    }

    /// Directory of a container's cgroup.
    pub fn of(&self, container: &str) -> PathBuf {
        self.path().join(match self.slice {
            Some(_) => format!("cri-containerd-{container}.scope"),
            None => container.to_owned(),
        })
    }

    /// Removes the cgroup, once it is empty.
    pub fn remove(&self) -> Result<()> {
        let path = self.path();
        let not_empty = || format!("{} is not empty", path.display());
        let Some(slice) = &self.slice else {
            return std::fs::remove_dir(&path).with_context(not_empty);
        };
        poll(GOING, PAUSE, || {
            let left = below(&path)?;
            met(left.is_empty(), || format!("{}: {left:?}", not_empty()))
        })?;
        systemctl(&["stop", slice])?;
        ensure!(!path.exists(), "{} is still there", path.display());
        Ok(())
    }
}

/// The scopes of containers in systemd.
pub fn scopes() -> Result<Vec<String>> {
    let units = systemctl(&[
        "list-units",
        "--all",
        "--plain",
        "--no-legend",
        "cri-containerd-*",
    ])?;
    let names = units.lines().filter_map(|line| line.split_whitespace().next());
    Ok(names.map(str::to_owned).collect())
}

/// Runs a command of `systemctl`; returns its output.
pub fn systemctl(words: &[&str]) -> Result<String> {
    finish(Command::new("systemctl").args(words))
}

fn below(cgroup: &Path) -> Result<Vec<PathBuf>> {
    if !cgroup.exists() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(cgroup)?.flatten().map(|entry| entry.path());
    Ok(entries.filter(|path| path.is_dir()).collect())
}
