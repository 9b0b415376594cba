//! An opened disk, as the monitor hands it to the VMM.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use husk_proto::vmm::v1::disk::Cache;

use super::block_sizes::BlockSizes;
use super::image_format::ImageFormat;

/// One disk's data.
#[derive(Debug)]
pub struct OpenDisk {
    /// A file, block device or sealed memory; none for a drive without a medium.
    pub file: Option<OwnedFd>,
    /// What `file`, which is empty, is to become an overlay of.
    pub base: Option<BackingImage>,
    /// What the image, that of the base if there is one, is called in errors.
    pub path: PathBuf,
    /// The descriptor, and so the disk, cannot be written.
    pub read_only: bool,
    /// The cache mode the descriptor is in.
    pub cache: Cache,
    /// The format of the data.
    pub format: ImageFormat,
    /// The block sizes the guest is reported; none if that is the VMM's choice.
    pub block_sizes: Option<BlockSizes>,
    /// What belongs to a SCSI device of the host.
    pub lun: Option<OpenLun>,
}

/// An image that is only read, and shows where its overlay holds nothing.
#[derive(Debug)]
pub struct BackingImage {
    /// The image, locked against whoever would write it.
    pub file: OwnedFd,
    /// Its format.
    pub format: ImageFormat,
}

/// What belongs to a SCSI device of the host.
#[derive(Debug)]
pub struct OpenLun {
    /// Where commands are executed that need CAP_SYS_RAWIO, if this process has it.
    pub privileged: Option<OwnedFd>,
    /// Segments of memory that the host has in one transfer; 0 if unknown.
    pub max_segments: u32,
}

/// An open image, and what it lies on.
#[derive(Debug)]
pub(super) struct DiskImage {
    pub(super) file: OwnedFd,
    pub(super) cache: Cache,
    pub(super) format: ImageFormat,
    pub(super) base: Option<BackingImage>,
    pub(super) path: PathBuf,
}

impl DiskImage {
    pub(super) fn new((file, cache): (OwnedFd, Cache), format: ImageFormat, path: &Path) -> DiskImage {
        DiskImage {
            file,
            cache,
            format,
            base: None,
            path: path.to_owned(),
        }
    }

    pub(super) fn raw(opened: (OwnedFd, Cache), path: &Path) -> DiskImage {
        DiskImage::new(opened, ImageFormat::Raw, path)
    }

    /// What holds the disk's content at first.
    pub(super) fn content(&self) -> (&OwnedFd, ImageFormat) {
        match &self.base {
            Some(base) => (&base.file, base.format),
            None => (&self.file, self.format),
        }
    }
}
