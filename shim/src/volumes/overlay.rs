//! Writable disks over images that must not change. Until the VMM serves overlays, a private copy is one.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::OFlags;

use super::error::Fault;
use super::path::Found;
use super::scratch::Scratch;

/// A disk with the content of `base`, which the caller keeps locked meanwhile. What is written to it ends with it.
pub(super) fn over(base: &Found, scratch: &Scratch, tell: &dyn Fn(u64, u64)) -> Result<OwnedFd, Fault> {
    // Without O_DIRECT, whatever the disk's cache mode: a copy reads at any offset.
    let file = File::from(base.open(OFlags::RDONLY).map_err(Fault::io(&base.path))?);
    scratch.copy(&file, tell)
}
