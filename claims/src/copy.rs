//! Copies the data of a sparse file without its holes.

use std::fs::File;
use std::io;

use rustix::fs::{SeekFrom, copy_file_range, seek};
use rustix::io::Errno;

/// Bytes of one copy_file_range(2), after which progress is reported.
const STEP: u64 = 64 << 20;

/// Copies `from` to the empty file `to`. Calls `progress` with bytes copied, holes included.
pub(crate) fn copy(from: &File, to: &File, progress: &dyn Fn(u64)) -> io::Result<()> {
    let size = from.metadata()?.len();
    to.set_len(size)?;
    let mut offset = 0;
    while let Some(begin) = data_after(from, offset)? {
        let end = seek(from, SeekFrom::Hole(begin))?;
        offset = begin;
        while offset < end {
            let (mut read, mut write) = (offset, offset);
            let length = usize::try_from((end - offset).min(STEP)).unwrap_or(usize::MAX);
            let copied = copy_file_range(from, Some(&mut read), to, Some(&mut write), length)?;
            if copied == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            offset += copied as u64;
            progress(offset);
        }
    }
    progress(size);
    Ok(())
}

/// Start of the first data at or after an offset.
fn data_after(file: &File, offset: u64) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(offset)) {
        Ok(begin) => Ok(Some(begin)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
