//! Errors of the store.

use std::io;
use std::path::PathBuf;

use husk_vmi::MANIFEST_LIMIT;

use crate::key::Key;

/// Error of an object.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// A system call on a path failed.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The store has no such object.
    #[error("{0} not found")]
    NotFound(Key),
    /// The file of an object is not what it should be.
    #[error("{}: {reason}", path.display())]
    Damaged { path: PathBuf, reason: String },
    /// The object is of no kind that is stored.
    #[error("{0} is not stored: Husk does not support this kind")]
    Kind(String),
    /// The file of the object would be larger than a manifest may be.
    #[error("{0} takes more than {limit} MiB in YAML: make it smaller", limit = MANIFEST_LIMIT >> 20)]
    TooLarge(Key),
    /// The object is being deleted.
    #[error("{0} is being deleted: wait until that is complete")]
    Deleting(Key),
    /// The data of a Secret or ConfigMap with `immutable` cannot change.
    #[error("{0} is immutable: delete it first")]
    Immutable(Key),
}

impl ObjectError {
    pub(crate) fn io<E: Into<io::Error>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> ObjectError {
        let path = path.into();
        move |source| ObjectError::Io {
            path,
            source: source.into(),
        }
    }
}
