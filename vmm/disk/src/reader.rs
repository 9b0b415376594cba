//! Synchronous reads beside the queues, for who looks into an image.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::Geometry;

/// Reads a disk's content without a queue. Cheap to clone.
#[derive(Clone, Debug)]
pub struct DiskReader {
    file: Arc<File>,
    geometry: Geometry,
}

impl DiskReader {
    pub(crate) fn new(file: Arc<File>, geometry: Geometry) -> Self {
        Self { file, geometry }
    }

    /// Bytes of the disk.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.geometry.size
    }

    /// Fills `buf` with what the disk holds at byte `offset`. Any alignment.
    ///
    /// # Errors
    /// `UnexpectedEof` if the range does not lie on the disk, else what the kernel says.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match offset.checked_add(buf.len() as u64) {
            Some(end) if end <= self.geometry.size => self.file.read_exact_at(buf, offset),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
