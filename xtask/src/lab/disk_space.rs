//! Checks that the machine's disk has space for the lab's writes.
//!
//! QEMU pauses a guest whose disk cannot grow; from outside, the lab then looks hung without a reason.

use anyhow::{Context, Result, bail};
use rustix::fs::statvfs;
use std::path::Path;

const MIB: u64 = 1024 * 1024;
/// Free space that a lab's disk needs: three times its growth in the case with the largest images.
const GROWTH: u64 = 6 * 1024 * MIB;
/// Free space below which QEMU must have paused a lab that hangs.
const FULL: u64 = 64 * MIB;

/// Fails if the filesystem of `folder`, where the lab's disk grows, has less free space than that.
pub fn ensure(folder: &Path) -> Result<()> {
    judge(folder, free(folder)?, GROWTH)
}

/// Fails if the filesystem of `folder` is full.
pub fn not_full(folder: &Path) -> Result<()> {
    judge(folder, free(folder)?, FULL)
}

fn judge(folder: &Path, free: u64, need: u64) -> Result<()> {
    if free < need {
        bail!(
            "{} has {} MiB free, and the lab's disk needs {}: make room there, or set XDG_CACHE_HOME to another disk",
            folder.display(),
            free / MIB,
            need / MIB
        );
    }
    Ok(())
}

/// Bytes that can still be written there.
fn free(folder: &Path) -> Result<u64> {
    let disk = statvfs(folder).with_context(|| format!("cannot see how full {} is", folder.display()))?;
    Ok(disk.f_bavail * disk.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_reported_with_its_numbers() {
        let folder = Path::new("/cache");
        judge(folder, GROWTH, GROWTH).expect("enough");
        let error = judge(folder, GROWTH - 1, GROWTH).expect_err("too little");
        assert!(
            error
                .to_string()
                .starts_with("/cache has 6143 MiB free, and the lab's disk needs 6144:"),
            "{error}"
        );
    }

    #[test]
    fn the_free_space_is_that_of_the_filesystem() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(free(folder.path()).expect("known") > 0);
        free(&folder.path().join("none")).expect_err("not there");
    }
}
