//! Guest kernels and disk images.

use crate::progress::Progress;
use anyhow::{Result, bail};

/// Arguments of `cargo xtask images`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Runs `cargo xtask images`.
pub fn run(_args: Args) -> Result<()> {
    bail!("`cargo xtask images` does nothing yet")
}

/// Makes every guest image the tests need, or finds it in the cache.
pub fn ensure_all(_progress: &Progress) -> Result<()> {
    Ok(())
}
