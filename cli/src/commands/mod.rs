//! The subcommands, one file each.

use clap::Subcommand;

use crate::failure::Failure;

mod completions;
mod doctor;

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Doctor(doctor::Args),
    Completions(completions::Args),
}

impl Command {
    /// Does it.
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self {
            Self::Doctor(args) => doctor::run(&args),
            Self::Completions(args) => completions::run(&args),
        }
    }
}
