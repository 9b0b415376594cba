//! An image's initramfs with files added.

use super::context::TestContext;
use super::images::Small;
use anyhow::{Context, Result};

/// Adds files as the benchmarks do; the tests are a separate crate.
#[path = "../../../xtask/src/archive.rs"]
mod archive;

/// `image` with `files`, by name and content, all executable; their folders must exist.
pub fn with_files(ctx: &TestContext, image: &Small, files: &[(&str, &[u8])]) -> Result<Small> {
    let mut initrd =
        std::fs::read(&image.initrd).with_context(|| format!("cannot read {}", image.initrd.display()))?;
    archive::pad(&mut initrd);
    initrd.extend(archive::newc(files));
    let path = ctx.path("initrd");
    std::fs::write(&path, initrd)?;
    Ok(Small {
        kernel: image.kernel.clone(),
        initrd: path,
    })
}
