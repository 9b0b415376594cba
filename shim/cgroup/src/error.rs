//! Errors of making and changing cgroups.

use std::io;
use std::path::{Path, PathBuf};

/// Error of making or changing a cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No cgroup2 file system is mounted.
    #[error("no cgroup2 file system is mounted: Husk needs cgroup version 2")]
    NoHierarchy,
    /// `linux.cgroupsPath` leads out of the hierarchy or to its root.
    #[error(
        "linux.cgroupsPath {0:?} is not a path below the cgroup hierarchy: use /PATH or SLICE.slice:PREFIX:NAME"
    )]
    BadPath(String),
    /// `linux.cgroupsPath` has colons but does not name a systemd scope.
    #[error("linux.cgroupsPath {text:?}: {reason}")]
    BadScope { text: String, reason: &'static str },
    /// The D-Bus system bus is not reachable.
    #[error(
        "linux.cgroupsPath needs systemd for {unit}, but the system bus {} cannot be reached ({reason}): install dbus, or set \
         cgroupDriver: cgroupfs in the kubelet's configuration",
        bus.display()
    )]
    NoSystemd {
        unit: String,
        /// Socket of the system bus.
        bus: PathBuf,
        reason: String,
    },
    /// systemd refused a request.
    #[error("systemd cannot manage {unit}: {reason}")]
    Systemd { unit: String, reason: String },
    /// The controller for a limit is not available in the cgroup.
    #[error(
        "{} does not exist, so {what} cannot be limited: enable the {} controller of cgroup version 2",
        path.display(), controller
    )]
    NoController {
        /// Resource to limit.
        what: &'static str,
        controller: &'static str,
        path: PathBuf,
    },
    /// A key of `linux.resources.unified` is not a controller's file.
    #[error("linux.resources.unified: {0:?} is not a cgroup file")]
    BadFile(String),
    /// The calling process would have to kill itself.
    #[error("{}: refusing to remove the cgroup of this process", .0.display())]
    OwnCgroup(PathBuf),
    /// A system call on a cgroup file failed.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl CgroupError {
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> CgroupError + '_ {
        move |source| CgroupError::Io {
            path: path.to_owned(),
            source,
        }
    }
}
