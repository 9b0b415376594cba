//! Benchmarks beside QEMU.

use anyhow::{Result, bail};

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Runs `cargo xtask bench`.
pub fn run(_args: Args) -> Result<()> {
    bail!("`cargo xtask bench` does nothing yet")
}
