//! Writable disks over images that must not change: qcow2 overlays that end with the VM.
//!
//! Only an empty file is made here. The VMM, which is confined, reads what the image says of its size, and makes the
//! overlay of it.

use std::os::fd::OwnedFd;
use std::path::Path;

use husk_proto::vmm::v1::disk::Cache;

use super::error::VolumeFault;
use super::image::{self, ImageAccess};
use super::image_format::ImageFormat;
use super::open_disk::{BackingImage, DiskImage};
use super::path_handle::PathHandle;
use super::scratch::ScratchDir;

/// A disk with the content of an image that nobody writes as long as the disk is there. Any number of VMs may have it
/// for a base.
pub(super) fn over(
    base: &PathHandle,
    format: ImageFormat,
    access: ImageAccess,
    scratch: &ScratchDir,
) -> Result<DiskImage, VolumeFault> {
    let access = ImageAccess {
        read_only: true,
        ..access.buffered()
    };
    let (file, cache) = image::open(base, access)?;
    on(file, format, cache, &base.path, scratch)
}

/// The same over an open image, called `path` in errors.
pub(super) fn on(
    base: OwnedFd,
    format: ImageFormat,
    cache: Cache,
    path: &Path,
    scratch: &ScratchDir,
) -> Result<DiskImage, VolumeFault> {
    Ok(DiskImage {
        file: scratch.file()?.into(),
        cache,
        format: ImageFormat::Qcow2,
        base: Some(BackingImage { file: base, format }),
        path: path.to_owned(),
    })
}
