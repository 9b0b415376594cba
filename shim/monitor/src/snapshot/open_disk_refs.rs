//! References to the open images of a disk, from its opening until the VM ends.

use std::io;
use std::path::PathBuf;

use husk_volumes::{BlockSizes, ImageFormat, ImageHandle, OpenDisk};

/// An open disk, as far as a snapshot needs it. It neither opens nor locks an image.
#[derive(Debug)]
pub(crate) struct KeptDisk {
    /// None: an empty drive.
    pub(super) image: Option<KeptImage>,
    pub(super) base: Option<KeptImage>,
    pub(super) block_sizes: Option<BlockSizes>,
    /// For errors.
    pub(super) path: PathBuf,
}

/// An open image.
#[derive(Debug)]
pub(super) struct KeptImage {
    pub(super) handle: ImageHandle,
    pub(super) format: ImageFormat,
    /// No path leads to it: it was made for this VM.
    private: bool,
}

impl KeptDisk {
    pub(crate) fn of(open: &OpenDisk) -> io::Result<KeptDisk> {
        let image = open.file.as_ref().map(|file| {
            Ok::<_, io::Error>(KeptImage {
                handle: ImageHandle::of(file)?,
                format: open.format,
                private: open.private,
            })
        });
        let base = open.base.as_ref().map(|base| {
            Ok::<_, io::Error>(KeptImage {
                handle: ImageHandle::of(&base.file)?,
                format: base.format,
                private: base.private,
            })
        });
        Ok(KeptDisk {
            image: image.transpose()?,
            base: base.transpose()?,
            block_sizes: open.block_sizes,
            path: open.path.clone(),
        })
    }
}

impl KeptImage {
    /// True if a snapshot must hold it, since no path leads to it.
    pub(super) fn is_private(&self) -> io::Result<bool> {
        Ok(self.private || self.handle.is_nameless()?)
    }
}
