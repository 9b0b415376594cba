//! Synchronous reads beside the engines, such as by the boot loader.

use std::io;
use std::os::unix::fs::FileExt;

use crate::Disk;
use crate::aligned_buf::AlignedBuf;
use crate::disk::ImageBackend;
use crate::geometry::Align;

/// Bytes read at a time if memory must be aligned.
const PIECE: u64 = 64 << 10;

/// Reads a disk's content without an engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct DiskReader(Disk);

impl Disk {
    /// A handle for synchronous reads, usable while engines serve the disk.
    #[must_use]
    pub fn reader(&self) -> DiskReader {
        DiskReader(self.clone())
    }
}

impl DiskReader {
    /// Size of the disk in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.size()
    }

    /// Fills `buf` from byte `offset` of the disk. Any alignment.
    ///
    /// # Errors
    /// `UnexpectedEof`: the range is not on the disk. Else the kernel's error.
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
        // The file is open for direct I/O: read whole blocks through aligned memory.
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
