//! Why a cgroup could not be made or changed.

use std::io;
use std::path::{Path, PathBuf};

/// Why a cgroup could not be made or changed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// There is no version 2.
    #[error("no cgroup2 file system is mounted: Husk needs cgroup version 2")]
    NoHierarchy,
    /// A path that leads elsewhere.
    #[error("linux.cgroupsPath {0:?} is no path below the cgroup hierarchy")]
    BadPath(String),
    /// A scope of systemd's that is none.
    #[error("linux.cgroupsPath {text:?}: {reason}")]
    BadScope {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// There is no bus on which systemd could be asked for a scope.
    #[error(
        "linux.cgroupsPath asks for {unit} of systemd's, but {} is no bus ({reason}): install dbus, or set \
         cgroupDriver: cgroupfs in the kubelet's configuration",
        bus.display()
    )]
    NoSystemd {
        /// The unit to make.
        unit: String,
        /// The socket of the system's bus.
        bus: PathBuf,
        /// How it failed.
        reason: String,
    },
    /// systemd refused.
    #[error("systemd was asked for {unit}: {reason}")]
    Systemd {
        /// The unit.
        unit: String,
        /// What it said.
        reason: String,
    },
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
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> CgroupError + '_ {
        move |source| CgroupError::Io {
            path: path.to_owned(),
            source,
        }
    }
}
