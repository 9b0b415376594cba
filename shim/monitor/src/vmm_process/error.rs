//! Errors of starting a VMM.

use std::io;

use crate::program::{NotFound, NotStarted};

/// An error of starting a VMM.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// No executable of that name.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// The kernel refused.
    #[error(transparent)]
    Exec(#[from] NotStarted),
    /// The VMM's cgroup cannot be opened.
    #[error("the VMM's cgroup cannot be entered")]
    Cgroup(#[source] io::Error),
    /// The VMM's oom_score_adj cannot be set.
    #[error("the VMM's oom_score_adj cannot be set")]
    OomScoreAdj(#[source] io::Error),
    /// The control sockets could not be created.
    #[error("could not create sockets for the VMM")]
    Sockets(#[from] io::Error),
}
