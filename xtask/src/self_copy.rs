//! A copy of this program that can be run again where KVM is.

use crate::checkout;
use anyhow::{Context, Result};
use std::os::unix::fs::PermissionsExt;
use tempfile::TempPath;

/// Copies this program into the folder that the lab shares, for as long as the path is held: a build may replace the
/// original meanwhile.
pub fn copy() -> Result<TempPath> {
    let share = checkout::folder(checkout::target().join("lab/share"))?;
    let mut copy = tempfile::Builder::new().prefix("xtask.").tempfile_in(share)?;
    let mut this = std::fs::File::open("/proc/self/exe").context("cannot read this program")?;
    std::io::copy(&mut this, copy.as_file_mut())?;
    copy.as_file().set_permissions(PermissionsExt::from_mode(0o755))?;
    Ok(copy.into_temp_path())
}
