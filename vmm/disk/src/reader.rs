//! Synchronous reads beside the engines, for who looks into an image.

use std::io;
use std::os::unix::fs::FileExt;

use crate::Disk;
use crate::aligned_buf::AlignedBuf;
use crate::disk::ImageBackend;
use crate::geometry::Align;

/// Bytes read at a time where memory must be aligned.
const PIECE: u64 = 64 << 10;

/// Reads a disk's content without an engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct DiskReader(Disk);

impl DiskReader {
    pub(crate) fn new(disk: Disk) -> Self {
        Self(disk)
    }

    /// Bytes of the disk.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.size()
    }

    /// Fills `buf` with what the disk holds at byte `offset`. Any alignment.
    ///
    /// # Errors
    /// `UnexpectedEof` if the range does not lie on the disk, else what the kernel says.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let end = offset
            .checked_add(buf.len() as u64)
            .filter(|end| *end <= self.size());
        let Some(end) = end else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let align = self.0.align();
        let file = match self.0.backend() {
            ImageBackend::File(file) => file,
            ImageBackend::Qcow2(image) => return image.read(offset, buf),
        };
        if align == Align::NONE {
            return file.read_exact_at(buf, offset);
        }
        // The file is open for direct I/O: whole blocks, by way of aligned memory.
        let step = PIECE.max(align.offset);
        let mut piece = AlignedBuf::new(step as usize, align.memory.max(align.offset as usize))?;
        let mut start = offset & !(align.offset - 1);
        while start < end {
            let stop = (start + step).min(end.next_multiple_of(align.offset));
            let memory = &mut piece.as_mut()[..(stop - start) as usize];
            file.read_exact_at(memory, start)?;
            let (from, to) = (start.max(offset), stop.min(end));
            buf[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&memory[(from - start) as usize..(to - start) as usize]);
            start = stop;
        }
        Ok(())
    }
}
