//! qcow2 overlays, which end with the VM, for images that must not change.
//!
//! This only creates an empty file. The confined VMM reads the image's size and formats the overlay.

use std::path::Path;

use husk_proto::vmm::v1::disk::Cache;

use super::error::VolumeFault;
use super::image::{self, ImageAccess};
use super::image_format::ImageFormat;
use super::open_disk::{BackingImage, DiskImage};
use super::path_handle::PathHandle;
use super::scratch::ScratchDir;

/// An overlay of an image. The image cannot be written while the overlay is open. Any number of VMs may share it.
pub(super) fn over(
    base: &PathHandle,
    format: ImageFormat,
    access: ImageAccess,
    scratch: &ScratchDir,
) -> Result<DiskImage, VolumeFault> {
    let access = ImageAccess {
        read_only: true,
        shareable: false,
        ..access.buffered()
    };
    let (file, cache) = image::open(base, access)?;
    let base_image = BackingImage {
        file,
        format,
        private: false,
    };
    on(base_image, cache, &base.path, scratch)
}

/// An overlay of an open image, called `path` in errors.
pub(super) fn on(
    base: BackingImage,
    cache: Cache,
    path: &Path,
    scratch: &ScratchDir,
) -> Result<DiskImage, VolumeFault> {
    Ok(DiskImage {
        file: scratch.file()?.into(),
        cache,
        format: ImageFormat::Qcow2,
        base: Some(base),
        private: true,
        path: path.to_owned(),
    })
}
