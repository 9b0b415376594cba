//! The cgroup (version 2) of a container: create it, limit it, read its statistics, remove it.
//!
//! Everything is done by reading and writing small files. A cgroup that is a systemd scope is created and removed by
//! systemd, over D-Bus.

mod error;
mod limits;
mod path;
mod placeholder;
mod properties;
mod scope;
mod stats;
mod systemd;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use oci_spec::runtime::LinuxResources;

use path::CgroupsPath;
use placeholder::Placeholder;
use scope::Scope;
use systemd::SystemdClient;

pub use error::CgroupError;
pub use path::hierarchy;
pub use stats::{CgroupStats, CpuStats, MemoryStats};

/// Attempts to remove a cgroup, and the time between two: the last process may still be exiting.
const REMOVE_ATTEMPTS: u32 = 50;
const REMOVE_INTERVAL: Duration = Duration::from_millis(20);

/// A cgroup that may not exist yet, or not any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    hierarchy: PathBuf,
    path: PathBuf,
    /// The systemd scope, if systemd manages this cgroup. systemd removes the cgroup when its last process ends.
    scope: Option<Scope>,
    /// OOM kills in the slice when the scope was created.
    slice_oom_kills: u64,
}

/// Keeps a new scope alive until its first process enters: systemd removes an empty scope.
#[derive(Debug)]
pub struct ScopeGuard {
    _placeholder: Option<Placeholder>,
}

impl Cgroup {
    /// The cgroup of `linux.cgroupsPath`: a path, or `SLICE:PREFIX:NAME` for a systemd scope.
    ///
    /// # Errors
    /// The path leads out of the hierarchy or to its root; the text is not a scope's name.
    pub fn from_cgroups_path(hierarchy: &Path, text: &str) -> Result<Cgroup, CgroupError> {
        Ok(match path::parse(text)? {
            CgroupsPath::Path(path) => Cgroup::at(hierarchy, &path),
            CgroupsPath::Scope(scope) => Cgroup {
                scope: Some(scope.clone()),
                ..Cgroup::at(hierarchy, &scope.path)
            },
        })
    }

    /// The cgroup at `path`, relative to the root of the hierarchy.
    #[must_use]
    pub fn at(hierarchy: &Path, path: &Path) -> Cgroup {
        Cgroup {
            hierarchy: hierarchy.to_owned(),
            path: hierarchy.join(path),
            scope: None,
            slice_oom_kills: 0,
        }
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the cgroup with limits, and enables the controllers in its parents. Leaves nothing behind on errors.
    /// Succeeds if the cgroup exists, unless systemd manages it. Blocks as long as systemd takes, up to seconds.
    ///
    /// # Errors
    /// The kernel or systemd refuses; a limit cannot be set.
    pub fn create(&mut self, resources: Option<&LinuxResources>) -> Result<ScopeGuard, CgroupError> {
        let placeholder = match &self.scope {
            None => {
                self.enable_controllers(true)?;
                None
            }
            Some(scope) => Some(self.start_scope(scope, resources)?),
        };
        if let Some(slice) = self.slice() {
            self.slice_oom_kills = stats::oom_kills(slice).unwrap_or(0);
        }
        let limited = resources.map_or(Ok(()), |resources| limits::apply(&self.path, resources));
        if let Err(error) = limited {
            let _ = self.remove();
            return Err(error);
        }
        Ok(ScopeGuard {
            _placeholder: placeholder,
        })
    }

    /// Asks systemd to start the scope.
    fn start_scope(
        &self,
        scope: &Scope,
        resources: Option<&LinuxResources>,
    ) -> Result<Placeholder, CgroupError> {
        let placeholder = Placeholder::start().map_err(|error| CgroupError::Systemd {
            unit: scope.unit.clone(),
            reason: format!("cannot start its first process: {error}"),
        })?;
        let limits = resources.map(properties::from_resources).unwrap_or_default();
        SystemdClient::default().start(scope, placeholder.pid(), limits)?;
        // systemd enables the controllers it knows. It does not know hugetlb.
        self.enable_controllers(false)?;
        if !self.path.exists() {
            // systemd uses another hierarchy, or escapes the name differently.
            return Err(CgroupError::Systemd {
                unit: scope.unit.clone(),
                reason: format!("it was started, but {} does not exist", self.path.display()),
            });
        }
        Ok(placeholder)
    }

    /// Enables the controllers in all parents, and creates missing directories if `make`.
    fn enable_controllers(&self, make: bool) -> Result<(), CgroupError> {
        let below = self.path.strip_prefix(&self.hierarchy).unwrap_or(Path::new(""));
        let mut parent = self.hierarchy.clone();
        for part in below.iter() {
            limits::enable_controllers(&parent);
            parent.push(part);
            if !make {
                continue;
            }
            match fs::create_dir(&parent) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(CgroupError::io(&parent)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Sets the limits. Blocks as [`Cgroup::create`] does.
    ///
    /// # Errors
    /// A limit cannot be set.
    pub fn set_limits(&self, resources: &LinuxResources) -> Result<(), CgroupError> {
        if let Some(scope) = &self.scope {
            SystemdClient::default().limit(&scope.unit, &properties::from_resources(resources))?;
        }
        limits::apply(&self.path, resources)
    }

    /// Moves a process into the cgroup.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add_process(&self, pid: u32) -> Result<(), CgroupError> {
        add_process(&self.path, pid)
    }

    /// Moves a process into the cgroup, or else into the nearest parent that takes it: the cgroup may be gone, and a
    /// parent with controllers takes no processes.
    ///
    /// # Errors
    /// The kernel refuses. The error is that of the cgroup itself.
    pub fn add_process_near(&self, pid: u32) -> Result<(), CgroupError> {
        let added = self.add_process(pid);
        let parents = self.path.ancestors().skip(1);
        let mut parents = parents.take_while(|parent| parent.starts_with(&self.hierarchy));
        if added.is_ok() || parents.any(|parent| add_process(parent, pid).is_ok()) {
            return Ok(());
        }
        added
    }

    /// Process ids in the cgroup.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let procs = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        procs.lines().filter_map(|line| line.parse().ok()).collect()
    }

    #[must_use]
    pub fn stats(&self) -> CgroupStats {
        CgroupStats::read(&self.path)
    }

    /// Number of processes that the OOM killer killed in this cgroup.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        // systemd may have removed the scope with its last process. Its slice has counted the kill too.
        let since_creation = || stats::oom_kills(self.slice()?)?.checked_sub(self.slice_oom_kills);
        stats::oom_kills(&self.path).or_else(since_creation).unwrap_or(0)
    }

    /// The slice that contains the scope.
    fn slice(&self) -> Option<&Path> {
        self.scope.as_ref().and(self.path.parent())
    }

    /// True if the process whose /proc/PID/cgroup has this text is in the cgroup or below it.
    fn has_process(&self, proc_cgroup: &str) -> bool {
        path_in(proc_cgroup).is_some_and(|path| self.hierarchy.join(path).starts_with(&self.path))
    }

    /// Kills all processes, unless the caller is one of them. Does not wait for their end.
    pub fn kill(&self) {
        self.kill_from(&own_cgroup());
    }

    /// As [`Cgroup::kill`], for a caller whose /proc/self/cgroup has the text `own`.
    fn kill_from(&self, own: &str) {
        if self.path != self.hierarchy && self.path.exists() && !self.has_process(own) {
            // cgroup.kill exists since Linux 5.14. On older kernels only the VMM is left here, and it ends with its
            // monitor.
            let kill = fs::OpenOptions::new()
                .write(true)
                .open(self.path.join("cgroup.kill"));
            let _ = kill.and_then(|mut kill| io::Write::write_all(&mut kill, b"1"));
        }
    }

    /// Kills all processes and removes the cgroup with its children. Waits at most one second, or as long as systemd
    /// takes. Succeeds if the cgroup does not exist.
    ///
    /// # Errors
    /// A process does not end, or the caller is one of them. Then none is killed.
    pub fn remove(&self) -> Result<(), CgroupError> {
        self.remove_by(&SystemdClient::default(), &own_cgroup())
    }

    /// As [`Cgroup::remove`], but waits at most this long for systemd.
    ///
    /// # Errors
    /// As for [`Cgroup::remove`].
    pub fn remove_within(&self, systemd: Duration) -> Result<(), CgroupError> {
        let systemd = SystemdClient {
            timeout: systemd,
            ..SystemdClient::default()
        };
        self.remove_by(&systemd, &own_cgroup())
    }

    fn remove_by(&self, systemd: &SystemdClient, own: &str) -> Result<(), CgroupError> {
        if self.path == self.hierarchy {
            return Ok(());
        }
        if self.has_process(own) {
            return Err(CgroupError::OwnCgroup(self.path.clone()));
        }
        self.kill_from(own);
        let stopped = match &self.scope {
            Some(scope) => systemd.stop(&scope.unit),
            None => Ok(()),
        };
        let mut tries = 0;
        loop {
            match remove_tree(&self.path) {
                // A removed directory has no processes, so systemd drops the unit soon, even if it cannot be asked now.
                Ok(()) => break,
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && tries < REMOVE_ATTEMPTS => {
                    tries += 1;
                    std::thread::sleep(REMOVE_INTERVAL);
                }
                Err(error) => return stopped.and(Err(CgroupError::io(&self.path)(error))),
            }
        }
        Ok(())
    }
}

/// The cgroup of the calling process.
///
/// # Errors
/// No cgroup2 file system is mounted.
pub fn current() -> Result<Cgroup, CgroupError> {
    let path = own_cgroup();
    let path = path_in(&path).unwrap_or_default();
    Ok(Cgroup::at(&hierarchy()?, Path::new(path)))
}

fn own_cgroup() -> String {
    fs::read_to_string("/proc/self/cgroup").unwrap_or_default()
}

/// Path of a process's cgroup, relative to the root of the hierarchy.
fn path_in(proc_cgroup: &str) -> Option<&str> {
    proc_cgroup.lines().find_map(|line| line.strip_prefix("0::/"))
}

fn add_process(cgroup: &Path, pid: u32) -> Result<(), CgroupError> {
    let procs = cgroup.join("cgroup.procs");
    fs::write(&procs, pid.to_string()).map_err(CgroupError::io(&procs))
}

/// Removes directories only: the files of a cgroup go with its directory.
fn remove_tree(path: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries.flatten() {
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    match fs::remove_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Formats bytes as MiB.
pub fn mib(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    match bytes.is_multiple_of(MIB) {
        true => format!("{} MiB", bytes / MIB),
        false => format!("{:.1} MiB", bytes as f64 / MIB as f64),
    }
}

#[cfg(test)]
mod tests;
