//! Synchronous reads beside the engines, such as by the boot loader.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use crate::aligned_buf::AlignedBuf;
use crate::disk::ImageBackend;
use crate::geometry::Align;
use crate::qcow2::ImageContent;
use crate::{Disk, DiskOptions, Extent};

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
            ImageBackend::File(file) | ImageBackend::Device(file, _) => file,
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

/// Reads a qcow2 image on the calling thread: it starts no threads, as [`Disk`] does.
#[derive(Debug)]
pub struct Qcow2Reader(ImageContent);

impl Qcow2Reader {
    /// Opens an image without a base, which is not written to.
    ///
    /// # Errors
    /// As [`Disk::open_qcow2`].
    pub fn open(image: OwnedFd) -> io::Result<Self> {
        let options = DiskOptions {
            read_only: true,
            ..DiskOptions::default()
        };
        ImageContent::open(File::from(image), None, options).map(Self)
    }

    /// Size of the disk in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.0.geometry().size
    }

    /// The extent that begins at byte `offset`, which is on the disk.
    ///
    /// # Errors
    /// The image is damaged, or the kernel's error.
    pub fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.0.extent(offset)
    }

    /// Fills `buf` from byte `offset` of the disk.
    ///
    /// # Errors
    /// `UnexpectedEof`: the range is not on the disk. Else the image is damaged, or the kernel's error.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match offset.checked_add(buf.len() as u64) {
            Some(end) if end <= self.size() => self.0.read(offset, buf),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
