//! `husk monitor`: the background process that `husk run` starts for each VM.

/// Monitor one VM; started by `husk run`, which passes the configuration on stdin
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}
