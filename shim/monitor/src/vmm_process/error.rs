//! Errors of starting a VMM.

use std::io;

use crate::program::{NotFound, Program};

/// An error of starting a VMM.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// No executable of that name.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// The kernel refused.
    #[error("{program} cannot be started: {cause}{}", program.hint())]
    Exec {
        /// The program.
        program: Program,
        /// The cause. It is part of the text, before the hint.
        cause: io::Error,
    },
    /// The VMM's cgroup cannot be opened.
    #[error("the VMM's cgroup cannot be entered")]
    Cgroup(#[source] io::Error),
    /// The control sockets could not be created.
    #[error("could not create sockets for the VMM")]
    Sockets(#[from] io::Error),
}
