//! Errors of the store.

use std::io;
use std::path::{Path, PathBuf};

use husk_volumes::VolumeFault;

/// Error of the image store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A system call on a path failed.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// No directory for the data of an ordinary user.
    #[error("neither XDG_DATA_HOME nor HOME is set: set HUSK_DATA_DIR to a directory for images")]
    NoDataDirectory,
    /// No image has the name.
    #[error("no image {0} in the store: `husk images list` shows them")]
    NotFound(String),
    /// A VM has the image open.
    #[error("a running VM uses {0}")]
    InUse(String),
    /// Another process does not give the store back.
    #[error("another process of husk has held the lock {} for a minute: end it, and try again", .0.display())]
    Locked(PathBuf),
    /// The file system cannot hold the image.
    #[error("the image needs {needed} bytes, and {} has {free}: free space, or set HUSK_DATA_DIR", path.display())]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    /// The image cannot be unpacked.
    #[error("{0}")]
    Image(String),
}

impl StoreError {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> StoreError {
        let path = path.into();
        move |source| StoreError::Io { path, source }
    }

    /// As [`StoreError::io`], for system calls of rustix.
    pub(crate) fn errno(path: &Path) -> impl FnOnce(rustix::io::Errno) -> StoreError {
        let path = path.to_owned();
        move |source| StoreError::Io {
            path,
            source: source.into(),
        }
    }

    /// An error of unpacking, without the path of the staging directory, which means nothing to a user.
    pub(crate) fn unpacking(fault: VolumeFault) -> StoreError {
        StoreError::Image(match fault {
            VolumeFault::ContainerImage { reason, .. } => reason,
            VolumeFault::NoDisk(_) => "it has no file in folder /disk: it is not a containerDisk".into(),
            VolumeFault::ManyDisks(_) => {
                "it has several files in folder /disk, and a containerDisk has one".into()
            }
            other => other.to_string(),
        })
    }
}
