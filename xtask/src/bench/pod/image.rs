//! The container image that is started: from scratch, with a kernel and its initrd.

use crate::bench::container_image;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Its name in containerd.
pub const NAME: &str = "localhost/husk/bench:1";
/// The kernel in it.
pub const KERNEL: &str = "/boot/vmlinuz";
/// The initrd in it.
pub const INITRD: &str = "/boot/initrd";

/// Packs it below `folder`.
pub fn pack(folder: &Path, kernel: &Path, initrd: &Path) -> Result<PathBuf> {
    let (archive, tree) = (folder.join("image.tar"), tempfile::tempdir_in(folder)?);
    for (from, to) in [(kernel, KERNEL), (initrd, INITRD)] {
        let to = tree.path().join(to.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().context("no folder")?)?;
        std::fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    container_image::pack(tree.path(), NAME, &["/none"], &archive)?;
    Ok(archive)
}
