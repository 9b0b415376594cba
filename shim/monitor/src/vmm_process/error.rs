//! Errors of starting a VMM.

use std::io;

use super::vmm_program::VmmProgram;

/// Why no VMM was started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// No executable of that name.
    #[error("husk-vmm was found neither beside this program nor on PATH: set HUSK_VMM to its path")]
    NotFound,
    /// The kernel refused.
    #[error("{program} cannot be started: {cause}{}", program.hint())]
    Exec {
        /// What was to be executed.
        program: VmmProgram,
        /// Why it was not; in the text already, before the way out.
        cause: io::Error,
    },
    /// Its cgroup cannot be entered.
    #[error("the VMM's cgroup cannot be entered")]
    Cgroup(#[source] io::Error),
    /// The sockets for it could not be made.
    #[error("sockets for the VMM failed")]
    Sockets(#[from] io::Error),
}
