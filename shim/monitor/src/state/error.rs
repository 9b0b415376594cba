//! Errors of the runtime directory.

use std::io;
use std::path::{Path, PathBuf};

use husk_network::NetworkError;

/// An error of using the runtime directory or a VM in it.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A user without a login session has no runtime directory.
    #[error("no runtime directory: set XDG_RUNTIME_DIR or HUSK_RUNTIME_DIR to a directory of your own")]
    Nowhere,
    /// The directory is unsuitable: another user could place sockets in it, or it is used for something else.
    #[error(
        "{place} {why}: set HUSK_RUNTIME_DIR to an absolute path of your own that is empty or does not exist"
    )]
    Unfit {
        /// The directory, and the variable that named it.
        place: String,
        /// The problem.
        why: String,
    },
    /// The directory cannot be created or read.
    #[error("{place} cannot be used, set HUSK_RUNTIME_DIR to a directory of your own")]
    Unusable {
        /// The directory, and the variable that named it.
        place: String,
        /// The cause.
        source: io::Error,
    },
    /// A VM's directory holds other files and is left as it is.
    #[error("{} was not made by Husk: move it away", .0.display())]
    Foreign(PathBuf),
    /// A namespace or name is not a single path component.
    #[error("{0:?} is not a name")]
    BadName(String),
    /// No live VM has that name.
    #[error("no VM {namespace}/{name} is running")]
    NotFound {
        /// Namespace asked for.
        namespace: String,
        /// Name asked for.
        name: String,
    },
    /// A live VM has that name.
    #[error("VM {namespace}/{name} is already running")]
    Exists {
        /// Namespace asked for.
        namespace: String,
        /// Name asked for.
        name: String,
    },
    /// The network of a VM could not be restored.
    #[error("{} is kept: network changes could not be undone: {source}", dir.display())]
    Network {
        /// The VM's directory.
        dir: PathBuf,
        /// The cause.
        source: NetworkError,
    },
    /// The file system refused.
    #[error("{}", path.display())]
    Io {
        /// Path that was accessed.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl StateError {
    pub(super) fn io(path: &Path) -> impl FnOnce(io::Error) -> StateError + '_ {
        move |source| StateError::Io {
            path: path.to_owned(),
            source,
        }
    }
}
