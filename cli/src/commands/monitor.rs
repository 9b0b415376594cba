//! `husk monitor`: what `husk run` starts in the background for each VM.

/// Own one VM; started by `husk run`, which gives it the VM on stdin
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}
