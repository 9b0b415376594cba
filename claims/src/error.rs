//! Errors of the store.

use std::io;
use std::path::PathBuf;

/// Error of a volume.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// A system call on a path failed.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// No claim has the name.
    #[error("no volume {0}: `husk volume list` shows them")]
    NotFound(String),
    /// No claim can have the name.
    #[error("invalid volume name {name:?}: {fault}")]
    Name { name: String, fault: &'static str },
    /// A claim has the name.
    #[error("there is a volume {0} already: choose another name, or remove it with `husk volume rm {0}`")]
    Exists(String),
    /// A VM has the volume open.
    #[error("a running VM uses the volume {0}: stop it first")]
    InUse(String),
    /// The claim's file was damaged.
    #[error("{}: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
    /// Volumes do not shrink.
    #[error("the volume {name} has {size} bytes, and cannot shrink to {wanted}")]
    Shrinks { name: String, size: u64, wanted: u64 },
    /// A size that no disk has.
    #[error("the size is below the minimum of 1Mi")]
    TooSmall,
    /// The file system cannot hold a copy.
    #[error("the copy needs {needed} bytes, and {} has {free}: free space, or set HUSK_DATA_DIR", path.display())]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
}

impl ClaimError {
    pub(crate) fn io<E: Into<io::Error>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> ClaimError {
        let path = path.into();
        move |source| ClaimError::Io {
            path,
            source: source.into(),
        }
    }
}
