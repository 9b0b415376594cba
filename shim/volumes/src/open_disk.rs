//! An opened disk, as the monitor hands it to the VMM.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use husk_proto::vmm::v1::disk::Cache;

use super::block_sizes::BlockSizes;
use super::image_format::ImageFormat;

/// An open disk.
#[derive(Debug)]
pub struct OpenDisk {
    /// A file, block device or sealed memory; `None` for a drive without a medium.
    pub file: Option<OwnedFd>,
    /// The backing image, if `file` is an overlay.
    pub base: Option<BackingImage>,
    /// `file` is empty, and gets an overlay of the base.
    pub new_overlay: bool,
    /// `file` belongs to this VM alone: other programs do not know it by a path.
    pub private: bool,
    /// Path of the image, or of its backing image, for errors.
    pub path: PathBuf,
    /// True if the disk, and so the descriptor, is read-only.
    pub read_only: bool,
    /// Cache mode of the descriptor.
    pub cache: Cache,
    pub format: ImageFormat,
    /// Block sizes that the guest sees; `None` if the VMM chooses.
    pub block_sizes: Option<BlockSizes>,
    /// Set for a SCSI device of the host.
    pub lun: Option<OpenLun>,
}

/// Backing image of an overlay.
#[derive(Debug)]
pub struct BackingImage {
    /// Open for reading, and locked against writers.
    pub file: OwnedFd,
    pub format: ImageFormat,
    /// As [`OpenDisk::private`].
    pub private: bool,
}

/// A SCSI device of the host.
#[derive(Debug)]
pub struct OpenLun {
    /// Socket of the helper that executes commands which need CAP_SYS_RAWIO. `None` without that capability.
    pub privileged: Option<OwnedFd>,
    /// Segments in one transfer of the host; 0 if unknown.
    pub max_segments: u32,
}

/// An open image and its backing image.
#[derive(Debug)]
pub(super) struct DiskImage {
    pub(super) file: OwnedFd,
    pub(super) cache: Cache,
    pub(super) format: ImageFormat,
    pub(super) base: Option<BackingImage>,
    pub(super) private: bool,
    pub(super) path: PathBuf,
}

impl DiskImage {
    pub(super) fn new((file, cache): (OwnedFd, Cache), format: ImageFormat, path: &Path) -> DiskImage {
        DiskImage {
            file,
            cache,
            format,
            base: None,
            private: false,
            path: path.to_owned(),
        }
    }

    /// An image that belongs to this VM alone.
    pub(super) fn private(self) -> DiskImage {
        DiskImage {
            private: true,
            ..self
        }
    }

    pub(super) fn raw(opened: (OwnedFd, Cache), path: &Path) -> DiskImage {
        DiskImage::new(opened, ImageFormat::Raw, path)
    }

    /// The file with the disk's initial content.
    pub(super) fn content(&self) -> (&OwnedFd, ImageFormat) {
        match &self.base {
            Some(base) => (&base.file, base.format),
            None => (&self.file, self.format),
        }
    }
}
