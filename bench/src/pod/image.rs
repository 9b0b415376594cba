//! The container image of the benchmark: from scratch, with a kernel and its initrd.

use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use xtask::container_image;

/// Name of the image in containerd.
pub const NAME: &str = "localhost/husk/bench:1";
/// Path of the kernel in the image.
pub const KERNEL: &str = "/boot/vmlinuz";
/// Path of the initrd in the image.
pub const INITRD: &str = "/boot/initrd";

/// Packs the image below `folder`.
pub fn pack(folder: &Path, kernel: &Path, initrd: &Path) -> Result<PathBuf> {
    let (archive, tree) = (folder.join("image.tar"), tempfile::tempdir_in(folder)?);
    for (from, to) in [(kernel, KERNEL), (initrd, INITRD)] {
        let to = tree.path().join(to.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().context("no folder")?)?;
        std::fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    container_image::pack(tree.path(), NAME, &["/none"], &archive, false)?;
    Ok(archive)
}
