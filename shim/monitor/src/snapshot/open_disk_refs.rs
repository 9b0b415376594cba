//! References to the open images of a disk, from its opening until the VM ends.

use std::io;
use std::path::PathBuf;

use husk_volumes::{BlockSizes, ImageFormat, ImageHandle, OpenDisk};

/// References (`O_PATH`) to the images of an open disk, for snapshots. They neither open nor lock an image.
#[derive(Debug)]
pub(crate) struct OpenDiskRefs {
    /// None: an empty drive.
    pub(super) image: Option<OpenImageRef>,
    pub(super) base: Option<OpenImageRef>,
    pub(super) block_sizes: Option<BlockSizes>,
    /// For errors.
    pub(super) path: PathBuf,
}

/// An open image.
#[derive(Debug)]
pub(super) struct OpenImageRef {
    pub(super) handle: ImageHandle,
    pub(super) format: ImageFormat,
    /// No path leads to it: it was made for this VM.
    private: bool,
}

impl OpenDiskRefs {
    pub(crate) fn of(open: &OpenDisk) -> io::Result<OpenDiskRefs> {
        let image = open.file.as_ref().map(|file| {
            Ok::<_, io::Error>(OpenImageRef {
                handle: ImageHandle::of(file)?,
                format: open.format,
                private: open.private,
            })
        });
        let base = open.base.as_ref().map(|base| {
            Ok::<_, io::Error>(OpenImageRef {
                handle: ImageHandle::of(&base.file)?,
                format: base.format,
                private: base.private,
            })
        });
        Ok(OpenDiskRefs {
            image: image.transpose()?,
            base: base.transpose()?,
            block_sizes: open.block_sizes,
            path: open.path.clone(),
        })
    }
}

impl OpenImageRef {
    /// True if a snapshot must hold it, since no path leads to it.
    pub(super) fn is_private(&self) -> io::Result<bool> {
        Ok(self.private || self.handle.is_nameless()?)
    }
}
