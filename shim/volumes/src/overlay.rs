//! Writable disks over images that must not change: qcow2 overlays that end with the VM.
//!
//! Only an empty file is made here. The VMM, which is confined, reads what the image says of its size, and makes the
//! overlay of it.

use std::os::fd::OwnedFd;
use std::path::Path;

use husk_proto::vmm::v1::disk::Cache;

use super::error::Fault;
use super::format::ImageFormat;
use super::image::{self, Access};
use super::path::Found;
use super::scratch::Scratch;
use super::{Base, Image};

/// A disk with the content of an image that nobody writes as long as the disk is there. Any number of VMs may have it
/// for a base.
pub(super) fn over(
    base: &Found,
    format: ImageFormat,
    access: Access,
    scratch: &Scratch,
) -> Result<Image, Fault> {
    let access = Access {
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
    scratch: &Scratch,
) -> Result<Image, Fault> {
    Ok(Image {
        file: scratch.file()?.into(),
        cache,
        format: ImageFormat::Qcow2,
        base: Some(Base { file: base, format }),
        path: path.to_owned(),
    })
}
