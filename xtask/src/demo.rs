//! The demonstration.

use anyhow::{Result, bail};

/// Arguments of `cargo xtask demo`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Runs `cargo xtask demo`.
pub fn run(_args: Args) -> Result<()> {
    bail!("`cargo xtask demo` does nothing yet")
}
