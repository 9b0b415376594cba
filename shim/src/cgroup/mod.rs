//! The cgroup of a container (version 2): made, limited, read, removed. All of it is reading and writing small files.

mod limits;
mod path;
mod stats;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use oci_spec::runtime::LinuxResources;

pub use path::{hierarchy, relative};
pub use stats::{CpuStats, MemoryStats, Stats};

/// How often, and how often again, an emptied cgroup is tried to be removed: its last process may still be exiting.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// Why a cgroup could not be made or changed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// There is no version 2.
    #[error("no cgroup2 file system is mounted: Husk needs cgroup version 2")]
    NoHierarchy,
    /// A path that leads elsewhere.
    #[error("linux.cgroupsPath {0:?} is no path below the cgroup hierarchy")]
    BadPath(String),
    /// The systemd driver.
    #[error(
        "linux.cgroupsPath {0:?} is for systemd to make, which is not supported: set cgroupDriver: cgroupfs in the \
         kubelet's configuration"
    )]
    Systemd(String),
    /// A limit that cannot be kept.
    #[error(
        "{} is not there, so {what} cannot be limited: the {} controller of cgroup version 2 is not available",
        path.display(), controller
    )]
    NoController {
        /// What was to be limited.
        what: &'static str,
        /// By whom.
        controller: &'static str,
        /// In which file.
        path: PathBuf,
    },
    /// A name in `linux.resources.unified` that is none of a file.
    #[error("linux.resources.unified: {0:?} is no file of a cgroup")]
    BadFile(String),
    /// The kernel refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl CgroupError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> CgroupError + '_ {
        move |source| CgroupError::Io {
            path: path.to_owned(),
            source,
        }
    }
}

/// A cgroup, which may not be there yet or any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    hierarchy: PathBuf,
    path: PathBuf,
}

impl Cgroup {
    /// The cgroup at this path, relative to the hierarchy's root.
    #[must_use]
    pub fn at(hierarchy: &Path, path: &Path) -> Cgroup {
        Cgroup {
            hierarchy: hierarchy.to_owned(),
            path: hierarchy.join(path),
        }
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes it, with the controllers that its parents can pass on. Succeeds if it is there.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn create(&self) -> Result<(), CgroupError> {
        let below = self.path.strip_prefix(&self.hierarchy).unwrap_or(Path::new(""));
        let mut parent = self.hierarchy.clone();
        for part in below.iter() {
            limits::pass_on(&parent);
            parent.push(part);
            match fs::create_dir(&parent) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(CgroupError::io(&parent)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Sets its limits.
    ///
    /// # Errors
    /// A limit cannot be kept.
    pub fn limit(&self, resources: &LinuxResources) -> Result<(), CgroupError> {
        limits::apply(&self.path, resources)
    }

    /// Takes a process in.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn enter(&self, pid: u32) -> Result<(), CgroupError> {
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
    pub fn stats(&self) -> Stats {
        Stats::read(&self.path)
    }

    /// How many of its processes the kernel killed for want of memory.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        stats::keyed(&self.path, "memory.events", "oom_kill").unwrap_or(0)
    }

    /// Kills what is in it and removes it, with all below. Waits a second at most; succeeds if it is not there.
    ///
    /// # Errors
    /// Something in it does not end.
    pub fn remove(&self) -> Result<(), CgroupError> {
        if self.path == self.hierarchy || !self.path.exists() {
            return Ok(());
        }
        // Since Linux 5.14; before, what is left is known to be the VMM alone, which ends with its monitor.
        let kill = fs::OpenOptions::new()
            .write(true)
            .open(self.path.join("cgroup.kill"));
        let _ = kill.and_then(|mut kill| io::Write::write_all(&mut kill, b"1"));
        let mut tries = 0;
        loop {
            match remove_tree(&self.path) {
                Ok(()) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) && tries < TRIES => {
                    tries += 1;
                    std::thread::sleep(PAUSE);
                }
                Err(error) => return Err(CgroupError::io(&self.path)(error)),
            }
        }
    }
}

/// The cgroup this process is in.
///
/// # Errors
/// There is no cgroup2 file system.
pub fn own() -> Result<Cgroup, CgroupError> {
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
pub(crate) fn mib(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    match bytes.is_multiple_of(MIB) {
        true => format!("{} MiB", bytes / MIB),
        false => format!("{:.1} MiB", bytes as f64 / MIB as f64),
    }
}

#[cfg(test)]
mod tests;
