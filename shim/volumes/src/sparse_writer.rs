//! Writes files with holes for zeros.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

/// Granularity of holes, in bytes.
const BLOCK: usize = 64 << 10;
/// Granularity of storage, in bytes: a file system stores a whole block for a few bytes.
const PAGE: u64 = 4 << 10;

/// Writes a file from its start and leaves holes for zeros.
#[derive(Debug)]
pub struct SparseWriter<'a> {
    file: &'a File,
    offset: u64,
    /// Bytes of the pages that hold data.
    stored: u64,
    /// End of the last of these pages, in pages.
    stored_to: u64,
    /// Limit for `stored`.
    room: u64,
}

impl<'a> SparseWriter<'a> {
    /// Writes to an empty file, whose data may take `room` bytes in whole pages of 4 KiB. Writing more fails with
    /// `StorageFull`.
    #[must_use]
    pub fn new(file: &'a File, room: u64) -> SparseWriter<'a> {
        SparseWriter {
            file,
            offset: 0,
            stored: 0,
            stored_to: 0,
            room,
        }
    }

    /// Leaves a hole.
    pub fn skip(&mut self, bytes: u64) {
        self.offset += bytes;
    }

    /// Bytes so far, with holes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.offset
    }

    /// Sets the length of the file, with holes at its end, and returns it.
    ///
    /// # Errors
    /// The file system has no files of this length.
    pub fn finish(self) -> io::Result<u64> {
        self.file.set_len(self.offset)?;
        Ok(self.offset)
    }
}

impl Write for SparseWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = BLOCK - (self.offset % BLOCK as u64) as usize;
        let part = &bytes[..bytes.len().min(left)];
        if part.iter().any(|byte| *byte != 0) {
            let first = (self.offset / PAGE).max(self.stored_to);
            self.stored_to = (self.offset + part.len() as u64).div_ceil(PAGE);
            self.stored += (self.stored_to - first) * PAGE;
            if self.stored > self.room {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.file.write_all_at(part, self.offset)?;
        }
        self.offset += part.len() as u64;
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn zeros_take_no_room_and_the_rest_no_more_than_there_is() {
        let file = tempfile::tempfile().unwrap();
        let mut writer = SparseWriter::new(&file, 3 * BLOCK as u64);
        let zeros = vec![0; 5 * BLOCK + 7];
        writer.write_all(&zeros).unwrap();
        writer.write_all(b"data").unwrap();
        writer.write_all(&zeros).unwrap();
        writer.skip(3);
        let size = writer.finish().unwrap();
        assert_eq!(size, 2 * zeros.len() as u64 + 7);
        assert_eq!(file.metadata().unwrap().len(), size);
        assert!(file.metadata().unwrap().blocks() * 512 <= 2 * BLOCK as u64);
        let mut read = [0; 6];
        file.read_exact_at(&mut read, zeros.len() as u64 - 1).unwrap();
        assert_eq!(&read, b"\0data\0");

        // Small pieces of one page, then of many.
        let file = tempfile::tempfile().unwrap();
        let mut writer = SparseWriter::new(&file, 4 * PAGE);
        for _ in 0..PAGE / 4 {
            writer.write_all(b"data").unwrap();
        }
        for _ in 1..4 {
            writer.write_all(b"data").unwrap();
            writer.skip(PAGE - 4);
        }
        let full = writer.write_all(b"data").unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
        assert_eq!(file.metadata().unwrap().blocks() * 512, 4 * PAGE);
    }
}
