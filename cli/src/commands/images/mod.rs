//! `husk images`.

mod list;
mod prune;
mod pull;
mod rm;

use clap::Subcommand;

use crate::failure::Failure;

/// Pull, list and remove container images
///
/// A containerDisk without --volume is pulled by `husk run`. Each user has a store of their own, which all their VMs
/// share: what is wanted of an image is unpacked once, and VMs write to overlays of it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: ImagesCommand,
}

#[derive(Debug, Subcommand)]
enum ImagesCommand {
    List(list::Args),
    Pull(pull::Args),
    Rm(rm::Args),
    Prune(prune::Args),
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    match &args.command {
        ImagesCommand::List(args) => list::run(args),
        ImagesCommand::Pull(args) => pull::run(args),
        ImagesCommand::Rm(args) => rm::run(args),
        ImagesCommand::Prune(args) => prune::run(args),
    }
}
