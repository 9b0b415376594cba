//! Copies of images: by shared extents where the file system has them, else of the data without the holes.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};

use rustix::fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek};
use rustix::io::Errno;

/// Bytes copied between two calls of the progress function.
const CHUNK: u64 = 8 << 20;
/// Size of the buffer where the kernel cannot copy, in bytes.
const BUFFER: usize = 1 << 20;
/// Granularity of the holes that are left for zeros, in bytes.
const HOLE: usize = 64 << 10;
/// Size of a block in `st_blocks`, in bytes.
const SECTOR: u64 = 512;

/// Makes `to` share the content of `from`. Both must be on one file system, which must have reflinks.
pub fn reflink(from: &File, to: &File) -> io::Result<()> {
    Ok(ioctl_ficlone(to, from)?)
}

/// Copies an image, which may be a block device, into the empty file `to`. Calls `progress` with the numbers of bytes
/// copied so far and of all; an error of it ends the copy. Moves the position of `from`. Blocks.
pub fn copy_image(
    from: &File,
    to: &File,
    progress: &mut dyn FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    let stat = from.metadata()?;
    // The metadata of a block device has no size.
    let size = seek(from, SeekFrom::End(0))?;
    let total = match stat.file_type().is_block_device() {
        true => size,
        false => size.min(stat.blocks().saturating_mul(SECTOR)),
    };
    progress(0, total)?;
    if reflink(from, to).is_ok() {
        return progress(total, total);
    }
    to.set_len(size)?;
    let mut copy = ExtentCopy {
        from,
        to,
        in_kernel: true,
        buffer: Vec::new(),
    };
    let (mut at, mut done) = (0, 0);
    while let Some((start, end)) = next_data(from, at, size)? {
        at = start;
        while at < end {
            let copied = copy.some(at, (end - at).min(CHUNK))?;
            at += copied;
            done += copied;
            progress(done.min(total), total)?;
        }
    }
    progress(total, total)
}

/// The next range of data at or behind `at`, in a file of `size` bytes. Where the file system does not tell, all of the
/// file is data. Moves the position of the file.
///
/// # Errors
/// The kernel's error.
pub fn next_data(file: &File, at: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= size {
        return Ok(None);
    }
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        // No data follows.
        Err(Errno::NXIO) => return Ok(None),
        // The file system does not tell.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((at, size))),
        Err(error) => return Err(error.into()),
    };
    let end = seek(file, SeekFrom::Hole(start))?.min(size);
    Ok((start < end).then_some((start, end)))
}

struct ExtentCopy<'a> {
    from: &'a File,
    to: &'a File,
    in_kernel: bool,
    buffer: Vec<u8>,
}

impl ExtentCopy<'_> {
    /// Copies at most `length` bytes at `at`, and at least one.
    fn some(&mut self, at: u64, length: u64) -> io::Result<u64> {
        if self.in_kernel {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let copied = copy_file_range(self.from, Some(&mut { at }), self.to, Some(&mut { at }), length);
            match copied {
                Ok(copied) if copied > 0 => return Ok(copied as u64),
                Ok(_) => {}
                Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {}
                Err(error) => return Err(error.into()),
            }
            self.in_kernel = false;
        }
        self.buffer.resize(BUFFER, 0);
        let length = self
            .buffer
            .len()
            .min(usize::try_from(length).unwrap_or(usize::MAX));
        let part = &mut self.buffer[..length];
        match self.from.read_at(part, at)? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            read => {
                write_sparse(self.to, &part[..read], at)?;
                Ok(read as u64)
            }
        }
    }
}

/// Writes `bytes` at `at` of a file that has only a hole there, and leaves holes for zeros: a block device has none, and
/// an image that was allocated in full few.
fn write_sparse(to: &File, bytes: &[u8], mut at: u64) -> io::Result<()> {
    for part in bytes.chunks(HOLE) {
        // Without a branch for each byte, so that the compiler uses wide registers.
        let mut lines = part.chunks(256);
        if lines.any(|line| line.iter().fold(0, |all, byte| all | byte) != 0) {
            to.write_all_at(part, at)?;
        }
        at += part.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A file of 64 MiB with data at two places.
    fn sparse() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 * MIB).unwrap();
        file.write_all_at(&[1; 70_000], 3 * MIB).unwrap();
        file.write_all_at(&[2; 5000], 40 * MIB + 123).unwrap();
        file
    }

    fn same(one: &File, two: &File) -> bool {
        let content = |file: &File| {
            let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        content(one) == content(two)
    }

    #[test]
    fn holes_stay_holes() {
        let (from, to) = (sparse(), tempfile::tempfile().unwrap());
        let mut last = (0, 0);
        copy_image(&from, &to, &mut |done, total| {
            assert!(done >= last.0 && done <= total);
            last = (done, total);
            Ok(())
        })
        .unwrap();
        assert!(last.0 == last.1 && last.1 < MIB, "{last:?}");
        assert!(same(&from, &to));
        assert!(to.metadata().unwrap().blocks() * SECTOR < MIB);
    }

    #[test]
    fn files_in_memory_are_copied() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let from = File::from(rustix::fs::memfd_create("from", flags).unwrap());
        from.write_all_at(b"seed", 70_000).unwrap();
        let to = tempfile::tempfile().unwrap();
        copy_image(&from, &to, &mut |_, _| Ok(())).unwrap();
        assert!(same(&from, &to));
        let mut copy = ExtentCopy {
            from: &from,
            to: &tempfile::tempfile().unwrap(),
            in_kernel: false,
            buffer: Vec::new(),
        };
        assert_eq!(copy.some(0, 100).unwrap(), 100);
        assert_eq!(
            copy.some(80_000, 1).unwrap_err().kind(),
            ErrorKind::UnexpectedEof,
            "the file has become shorter"
        );
    }

    #[test]
    fn zeros_become_holes_where_the_kernel_does_not_copy() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let from = File::from(rustix::fs::memfd_create("from", flags).unwrap());
        // Allocated, as an image of a storage provider.
        from.write_all_at(&vec![0; 4 << 20], 0).unwrap();
        from.write_all_at(b"data", MIB + 70_000).unwrap();
        from.write_all_at(b"end", 4 * MIB - 3).unwrap();
        let to = tempfile::tempfile().unwrap();
        let mut last = (0, 0);
        copy_image(&from, &to, &mut |done, total| {
            last = (done, total);
            Ok(())
        })
        .unwrap();
        assert_eq!(last, (4 * MIB, 4 * MIB));
        assert!(same(&from, &to));
        let allocated = to.metadata().unwrap().blocks() * SECTOR;
        assert!(allocated > 0 && allocated <= MIB / 2, "{allocated}");
    }

    #[test]
    fn a_copy_can_be_ended() {
        let (from, to) = (sparse(), tempfile::tempfile().unwrap());
        let mut calls = 0;
        let ended = copy_image(&from, &to, &mut |_, _| {
            calls += 1;
            match calls {
                1 => Ok(()),
                _ => Err(ErrorKind::Interrupted.into()),
            }
        });
        assert_eq!((ended.unwrap_err().kind(), calls), (ErrorKind::Interrupted, 2));
    }

    #[test]
    fn an_empty_file_is_copied() {
        let (from, to) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        copy_image(&from, &to, &mut |_, _| Ok(())).unwrap();
        assert_eq!(to.metadata().unwrap().len(), 0);
    }
}
