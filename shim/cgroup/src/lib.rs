//! The cgroup of a container (version 2): made, limited, read, removed. All of it is reading and writing small files, and
//! where the cgroup is a scope of systemd's, telling systemd before.

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

use nix::errno::Errno;
use oci_spec::runtime::LinuxResources;

use path::CgroupsPath;
use placeholder::Placeholder;
use scope::Scope;
use systemd::SystemdClient;

pub use error::CgroupError;
pub use path::hierarchy;
pub use stats::{CgroupStats, CpuStats, MemoryStats};

/// How often, and how often again, an emptied cgroup is tried to be removed: its last process may still be exiting.
const REMOVE_ATTEMPTS: u32 = 50;
const REMOVE_INTERVAL: Duration = Duration::from_millis(20);

/// A cgroup, which may not be there yet or any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    hierarchy: PathBuf,
    path: PathBuf,
    /// Which systemd makes and, as soon as no process is in it, removes.
    scope: Option<Scope>,
    /// How many processes the kernel had killed around it, when it was made.
    slice_oom_kills: u64,
}

/// Keeps a cgroup that was made for processes which are yet to come: systemd removes one that is empty.
#[derive(Debug)]
pub struct ScopeGuard {
    _placeholder: Option<Placeholder>,
}

impl Cgroup {
    /// The cgroup that `linux.cgroupsPath` names: by its path, or as `SLICE:PREFIX:NAME`.
    ///
    /// # Errors
    /// It leads out of the hierarchy, or to its root; or it is the name of no scope.
    pub fn from_cgroups_path(hierarchy: &Path, text: &str) -> Result<Cgroup, CgroupError> {
        Ok(match path::parse(text)? {
            CgroupsPath::Path(path) => Cgroup::at(hierarchy, &path),
            CgroupsPath::Scope(scope) => Cgroup {
                scope: Some(scope.clone()),
                ..Cgroup::at(hierarchy, &scope.path)
            },
        })
    }

    /// The cgroup at this path, relative to the hierarchy's root.
    #[must_use]
    pub fn at(hierarchy: &Path, path: &Path) -> Cgroup {
        Cgroup {
            hierarchy: hierarchy.to_owned(),
            path: hierarchy.join(path),
            scope: None,
            slice_oom_kills: 0,
        }
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it, with limits and with the controllers that its parents can pass on, or leaves nothing. Succeeds if it is
    /// there, unless it is systemd's to make. May block for as long as systemd takes: seconds, if something is wrong.
    ///
    /// # Errors
    /// The kernel or systemd refuses; a limit cannot be kept.
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

    /// Has systemd make it.
    fn start_scope(
        &self,
        scope: &Scope,
        resources: Option<&LinuxResources>,
    ) -> Result<Placeholder, CgroupError> {
        let placeholder = Placeholder::start().map_err(|error| CgroupError::Systemd {
            unit: scope.unit.clone(),
            reason: format!("no process to begin with: {error}"),
        })?;
        let limits = resources.map(properties::from_resources).unwrap_or_default();
        SystemdClient::default().start(scope, placeholder.pid(), limits)?;
        // systemd has passed on what it knows; huge pages are not among that.
        self.enable_controllers(false)?;
        if !self.path.exists() {
            // Another hierarchy than systemd's, or a name that it writes otherwise.
            return Err(CgroupError::Systemd {
                unit: scope.unit.clone(),
                reason: format!("it was started, but {} is not there", self.path.display()),
            });
        }
        Ok(placeholder)
    }

    /// Has its parents pass on their controllers, and makes what is missing if `make`.
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

    /// Sets its limits. May block as [`Cgroup::create`] does.
    ///
    /// # Errors
    /// A limit cannot be kept.
    pub fn set_limits(&self, resources: &LinuxResources) -> Result<(), CgroupError> {
        if let Some(scope) = &self.scope {
            SystemdClient::default().limit(&scope.unit, &properties::from_resources(resources))?;
        }
        limits::apply(&self.path, resources)
    }

    /// Takes a process in.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn add_process(&self, pid: u32) -> Result<(), CgroupError> {
        let procs = self.path.join("cgroup.procs");
        fs::write(&procs, pid.to_string()).map_err(CgroupError::io(&procs))
    }

    /// The processes in it.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let procs = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        procs.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// How much it has used.
    #[must_use]
    pub fn stats(&self) -> CgroupStats {
        CgroupStats::read(&self.path)
    }

    /// How many of its processes the kernel killed for want of memory.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        // systemd may have removed it with its last process: then it counts what the slice around it has seen since.
        let since_creation = || stats::oom_kills(self.slice()?)?.checked_sub(self.slice_oom_kills);
        stats::oom_kills(&self.path).or_else(since_creation).unwrap_or(0)
    }

    /// The slice of a scope.
    fn slice(&self) -> Option<&Path> {
        self.scope.as_ref().and(self.path.parent())
    }

    /// Kills what is in it and removes it, with all below. Waits a second at most, or as long as systemd takes; succeeds if
    /// it is not there.
    ///
    /// # Errors
    /// Something in it does not end.
    pub fn remove(&self) -> Result<(), CgroupError> {
        if self.path == self.hierarchy {
            return Ok(());
        }
        if self.path.exists() {
            // Since Linux 5.14; before, what is left is known to be the VMM alone, which ends with its monitor.
            let kill = fs::OpenOptions::new()
                .write(true)
                .open(self.path.join("cgroup.kill"));
            let _ = kill.and_then(|mut kill| io::Write::write_all(&mut kill, b"1"));
        }
        let stopped = match &self.scope {
            Some(scope) => SystemdClient::default().stop(&scope.unit),
            None => Ok(()),
        };
        let mut tries = 0;
        loop {
            match remove_tree(&self.path) {
                // Without a directory there is no process, so no unit for long, even if systemd cannot be asked.
                Ok(()) => break,
                Err(error)
                    if error.raw_os_error() == Some(Errno::EBUSY as i32) && tries < REMOVE_ATTEMPTS =>
                {
                    tries += 1;
                    std::thread::sleep(REMOVE_INTERVAL);
                }
                Err(error) => return stopped.and(Err(CgroupError::io(&self.path)(error))),
            }
        }
        Ok(())
    }
}

/// The cgroup this process is in.
///
/// # Errors
/// There is no cgroup2 file system.
pub fn current() -> Result<Cgroup, CgroupError> {
    let hierarchy = hierarchy()?;
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"));
    Ok(Cgroup::at(&hierarchy, Path::new(path.unwrap_or_default())))
}

/// A cgroup's files go with its directory; only directories are removed.
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

/// Bytes as people read them.
pub fn mib(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    match bytes.is_multiple_of(MIB) {
        true => format!("{} MiB", bytes / MIB),
        false => format!("{:.1} MiB", bytes as f64 / MIB as f64),
    }
}

#[cfg(test)]
mod tests;
