//! Reads an image and writes its disk.

use std::cell::Cell;
use std::error::Error;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::FileExt;

use husk_disk::Qcow2Reader;
use husk_volumes::{SparseWriter, decompress};
use lzma_rust2::XzReader;

use super::format::{Format, HEAD};
use super::report::{ConvertError, Converted};

/// Size of a disk is a multiple of this, in bytes, if the request does not have it.
const UNIT: u64 = 1 << 20;
/// Bytes that are read at a time; and read buffer of a decompressor.
const PIECE: usize = 1 << 20;
const BUFFER: usize = 128 << 10;
/// Memory of the xz decoder, in KiB; `xz -9` needs 65 MiB.
const XZ_MEMORY: u32 = 512 << 10;
/// Limit for a disk whose size neither the request nor the image has, in bytes: highly compressed data could keep the
/// CPU busy for days.
const MAX_UNPACKED: u64 = 1 << 40;
/// Bytes of the image between two progress reports.
const STEP: u64 = 16 << 20;

/// Limits of the output of a conversion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Size of the disk in bytes; the image's if not given.
    pub size: Option<u64>,
    /// Bytes that the data may take, without holes.
    pub room: u64,
}

/// Converts an image, whose format is detected, to a disk, which is an empty file. Calls `progress` with bytes of the
/// image that were read, and all.
///
/// # Errors
/// See [`ConvertError`].
pub fn convert(
    image: File,
    disk: &File,
    limits: Limits,
    progress: &dyn Fn(u64, u64),
) -> Result<Converted, ConvertError> {
    let mut head = [0; HEAD];
    let head = {
        let mut from_start = At {
            file: &image,
            offset: 0,
        };
        let read = fill(&mut from_start, &mut head).map_err(unreadable)?;
        &head[..read]
    };
    let size = image.metadata().map_err(unreadable)?.len();
    let read = &Cell::new(0);
    let source = Counted {
        // The head comes again.
        inner: At {
            file: &image,
            offset: 0,
        },
        read,
    };
    let progress = &Progress {
        report: progress,
        reported: Cell::new(0),
    };
    let advance = || progress.at(read.get(), size);
    match Format::of(head) {
        Format::Qcow2 => qcow2(image, disk, limits, progress),
        Format::Raw => {
            if limits.size.is_some_and(|wanted| size > wanted) {
                return Err(ConvertError::TooLarge { needed: Some(size) });
            }
            raw(source, disk, limits, &advance)
        }
        Format::Compressed => unpack(decompress(source).map_err(unreadable)?, disk, limits, &advance),
        Format::Xz => {
            let source = BufReader::with_capacity(BUFFER, source);
            let reader = XzReader::new_mem_limit(source, true, XZ_MEMORY);
            unpack(reader, disk, limits, &advance)
        }
        Format::Foreign(name, remedy) => Err(foreign(name, remedy)),
    }
}

/// Writes what a decompressor gives: a disk, or a qcow2 image.
fn unpack(
    mut reader: impl Read,
    disk: &File,
    limits: Limits,
    advance: &dyn Fn(),
) -> Result<Converted, ConvertError> {
    let mut head = [0; HEAD];
    let read = fill(&mut reader, &mut head).map_err(unreadable)?;
    let head = &head[..read];
    match Format::of(head) {
        Format::Raw => raw(head.chain(reader), disk, limits, advance),
        // Its file has no reason to be larger than the data in it: not even holes.
        Format::Qcow2 => {
            let mut writer = SparseWriter::new(disk, limits.room);
            let copied = copy(head.chain(reader), &mut writer, limits.room, advance);
            copied.map_err(|error| match error {
                ConvertError::TooLarge { .. } => ConvertError::Full,
                other => other,
            })?;
            writer.finish().map_err(unwritable)?;
            Ok(Converted::Unpacked)
        }
        Format::Compressed | Format::Xz => Err(ConvertError::Format {
            reason: "the image is compressed twice: compress it once".into(),
        }),
        Format::Foreign(name, remedy) => Err(foreign(name, remedy)),
    }
}

/// Writes the disk that the reader gives.
fn raw(
    reader: impl Read,
    disk: &File,
    limits: Limits,
    advance: &dyn Fn(),
) -> Result<Converted, ConvertError> {
    let mut writer = SparseWriter::new(disk, limits.room);
    copy(reader, &mut writer, limits.size.unwrap_or(MAX_UNPACKED), advance)?;
    finish(writer, disk, limits)
}

/// Copies at most `limit` bytes, in which zeros become holes.
fn copy(
    mut reader: impl Read,
    writer: &mut SparseWriter<'_>,
    limit: u64,
    advance: &dyn Fn(),
) -> Result<(), ConvertError> {
    let mut piece = vec![0; PIECE];
    loop {
        let read = fill(&mut reader, &mut piece).map_err(unreadable)?;
        if read == 0 {
            return Ok(());
        }
        if writer.length() + read as u64 > limit {
            return Err(ConvertError::TooLarge { needed: None });
        }
        writer.write_all(&piece[..read]).map_err(unwritable)?;
        advance();
    }
}

fn qcow2(
    image: File,
    disk: &File,
    limits: Limits,
    progress: &Progress<'_>,
) -> Result<Converted, ConvertError> {
    let image = Qcow2Reader::open(image.into()).map_err(unreadable)?;
    let size = image.size();
    if limits.size.is_some_and(|wanted| size > wanted) {
        return Err(ConvertError::TooLarge { needed: Some(size) });
    }
    let mut writer = SparseWriter::new(disk, limits.room);
    let mut piece = vec![0; PIECE];
    // Few bytes of tables can stand for any number of equal clusters.
    let mut left = limits.size.unwrap_or(MAX_UNPACKED);
    while writer.length() < size {
        let offset = writer.length();
        let extent = image.extent(offset).map_err(unreadable)?;
        let end = extent.offset.saturating_add(extent.len).min(size);
        if !extent.allocated {
            writer.skip(end - offset);
        }
        while writer.length() < end {
            let length = (end - writer.length()).min(PIECE as u64) as usize;
            let piece = &mut piece[..length];
            let refused = ConvertError::TooLarge { needed: None };
            left = left.checked_sub(piece.len() as u64).ok_or(refused)?;
            image.read_at(writer.length(), piece).map_err(unreadable)?;
            writer.write_all(piece).map_err(unwritable)?;
            progress.at(writer.length(), size);
        }
    }
    progress.at(size, size);
    finish(writer, disk, limits)
}

/// Gives the disk its size.
fn finish(writer: SparseWriter<'_>, disk: &File, limits: Limits) -> Result<Converted, ConvertError> {
    let written = writer.finish().map_err(unwritable)?;
    if written == 0 {
        return Err(ConvertError::Unreadable {
            reason: "it is empty".into(),
        });
    }
    let size = limits.size.unwrap_or(written.next_multiple_of(UNIT));
    disk.set_len(size).map_err(unwritable)?;
    Ok(Converted::Disk { size })
}

/// Reads until the buffer is full or the reader at its end.
fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match reader.read(&mut buffer[done..]) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn foreign(name: &str, remedy: &str) -> ConvertError {
    ConvertError::Format {
        reason: format!("the image is in the format {name}, which is not supported: {remedy}"),
    }
}

fn unreadable(error: io::Error) -> ConvertError {
    if is_of_the_file_system(&error) {
        return ConvertError::Failed {
            reason: format!("reading the image: {error}"),
        };
    }
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => "it is cut off".into(),
        io::ErrorKind::OutOfMemory => "it needs too much memory".into(),
        _ => error.to_string(),
    };
    ConvertError::Unreadable { reason }
}

/// True if the file system did not give the image's bytes. Decoders wrap its errors.
fn is_of_the_file_system(error: &io::Error) -> bool {
    let mut cause = error.get_ref().map(|cause| cause as &dyn Error);
    while let Some(inner) = cause {
        if inner.downcast_ref().is_some_and(is_of_the_file_system) {
            return true;
        }
        cause = inner.source();
    }
    matches!(
        error.raw_os_error(),
        Some(libc::EIO | libc::ESTALE | libc::ETIMEDOUT)
    )
}

fn unwritable(error: io::Error) -> ConvertError {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ConvertError::Full,
        _ => ConvertError::Failed {
            reason: format!("writing the disk: {error}"),
        },
    }
}

/// A file that is read from an offset on, wherever other readers are.
struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buffer, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

/// Counts what is read.
struct Counted<'a, R> {
    inner: R,
    read: &'a Cell<u64>,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.read.set(self.read.get() + read as u64);
        Ok(read)
    }
}

/// Reports progress, but not too often.
struct Progress<'a> {
    report: &'a dyn Fn(u64, u64),
    reported: Cell<u64>,
}

impl Progress<'_> {
    fn at(&self, done: u64, size: u64) {
        if done == size || done - self.reported.get() >= STEP {
            self.reported.set(done);
            (self.report)(done, size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_file_system_is_not_the_images() {
        let of = io::Error::from_raw_os_error;
        for error in [
            of(libc::EIO),
            of(libc::ESTALE),
            io::Error::other(of(libc::EIO)),
            io::Error::other(io::Error::other(of(libc::EIO))),
        ] {
            let text = error.to_string();
            assert!(matches!(unreadable(error), ConvertError::Failed { .. }), "{text}");
        }
        for error in [
            of(libc::EINVAL),
            io::ErrorKind::UnexpectedEof.into(),
            io::Error::other("a wrong header"),
        ] {
            let text = error.to_string();
            assert!(
                matches!(unreadable(error), ConvertError::Unreadable { .. }),
                "{text}"
            );
        }
    }

    #[test]
    fn decoders_hand_on_errors_of_the_file_system() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
        }
        let gzip: &[u8] = &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
        let zstd: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
        for head in [gzip, zstd] {
            let mut bytes = Vec::new();
            let read = decompress(head.chain(Broken)).and_then(|mut reader| reader.read_to_end(&mut bytes));
            let error = unreadable(read.unwrap_err());
            assert!(matches!(error, ConvertError::Failed { .. }), "{error:?}");
        }
        let xz: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
        let mut reader = XzReader::new_mem_limit(xz.chain(Broken), true, XZ_MEMORY);
        let error = unreadable(reader.read_to_end(&mut Vec::new()).unwrap_err());
        assert!(matches!(error, ConvertError::Failed { .. }), "{error:?}");
    }
}
