//! Reads untrusted tar archives with bounded memory. The crate `tar` parses the headers; its own iterator reads a long
//! name of any length into memory.

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use tar::{EntryType, GnuExtSparseHeader, GnuHeader, Header};

use super::super::error::Reason;

/// Size of a header, and alignment of content, in bytes.
pub(super) const BLOCK: usize = 512;
/// Limit for an extended header, including a GNU long name, in bytes. Go's writer has the same limit.
const MAX_EXTENDED: u64 = 1 << 20;

/// A reader that can skip bytes.
pub(super) trait Skip: Read {
    /// Skips bytes; an error if there are fewer.
    fn skip(&mut self, bytes: u64) -> io::Result<()>;
}

#[derive(Debug)]
pub(super) struct Entry {
    /// Without a leading `/` and without `.` components; empty for the root.
    pub(super) path: PathBuf,
    pub(super) kind: EntryType,
    /// Bytes of content that follow.
    pub(super) size: u64,
    /// GNU sparse format: the content is a list of extents with their data.
    pub(super) sparse: bool,
}

#[derive(Debug)]
pub(super) struct Tarball<R> {
    source: R,
    /// Unread content of the current member, and the padding after it, in bytes.
    content: u64,
    padding: u64,
}

/// True if a block is a POSIX or GNU header with a valid checksum.
pub(super) fn is_header(block: &[u8; BLOCK]) -> bool {
    let header = Header::from_byte_slice(block);
    (header.as_ustar().is_some() || header.as_gnu().is_some()) && is_sound(header)
}

fn is_sound(header: &Header) -> bool {
    let mut copy = header.clone();
    copy.set_cksum();
    matches!((header.cksum(), copy.cksum()), (Ok(given), Ok(right)) if given == right)
}

impl<R: Skip> Tarball<R> {
    pub(super) fn new(source: R) -> Tarball<R> {
        Tarball {
            source,
            content: 0,
            padding: 0,
        }
    }

    pub(super) fn source(&self) -> &R {
        &self.source
    }

    pub(super) fn into_source(self) -> R {
        self.source
    }

    /// The next member; `None` at the end. Reading from the archive then returns the member's content.
    pub(super) fn next(&mut self) -> Result<Option<Entry>, Reason> {
        let mut extended = ExtendedHeader::default();
        loop {
            let Some(block) = self.block()? else {
                return Ok(None);
            };
            let header = Header::from_byte_slice(&block);
            if !is_sound(header) {
                return Err("a header of the archive is damaged".into());
            }
            let kind = header.entry_type();
            let size = header.entry_size().map_err(|error| error.to_string())?;
            self.enter(size);
            match kind {
                EntryType::GNULongName => extended.path = Some(zero_ended(self.small()?)),
                EntryType::XHeader => extended.pax(&self.small()?)?,
                EntryType::GNULongLink | EntryType::XGlobalHeader => {}
                _ => {
                    self.skip_extents(header)?;
                    let size = extended.size.unwrap_or(size);
                    self.enter(size);
                    let sparse = extended.sparse || kind.is_gnu_sparse();
                    let path = extended.path.unwrap_or_else(|| header.path_bytes().into_owned());
                    return Ok(Some(Entry {
                        path: plain(&path)?,
                        kind,
                        size,
                        sparse,
                    }));
                }
            }
        }
    }

    /// Skips the headers that list the further extents of an old GNU sparse member, which `size` does not count.
    fn skip_extents(&mut self, header: &Header) -> Result<(), Reason> {
        let mut more =
            header.entry_type().is_gnu_sparse() && header.as_gnu().is_some_and(GnuHeader::is_extended);
        self.enter(0);
        while more {
            let mut extents = GnuExtSparseHeader::new();
            more = self.block()?.is_some_and(|block| {
                extents.as_mut_bytes().copy_from_slice(&block);
                extents.is_extended()
            });
        }
        Ok(())
    }

    fn enter(&mut self, size: u64) {
        self.content = size;
        self.padding = size.wrapping_neg() % BLOCK as u64;
    }

    /// Skips the rest of the current member and reads the next header.
    fn block(&mut self) -> Result<Option<[u8; BLOCK]>, Reason> {
        let short = |_| "the archive is cut short".to_owned();
        self.source.skip(self.content).map_err(short)?;
        self.source.skip(self.padding).map_err(short)?;
        self.enter(0);
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.source.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err("the archive is cut short".into()),
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok((block != [0; BLOCK]).then_some(block))
    }

    /// Reads the content of an extended header.
    fn small(&mut self) -> Result<Vec<u8>, Reason> {
        if self.content > MAX_EXTENDED {
            return Err(format!(
                "an extended header has {} bytes; the maximum is {MAX_EXTENDED}",
                self.content
            ));
        }
        let mut content = Vec::new();
        self.read_to_end(&mut content)
            .map_err(|error| error.to_string())?;
        if self.content > 0 {
            return Err("the archive is cut short".into());
        }
        Ok(content)
    }
}

/// Reads the content of the current member.
impl<R: Read> Read for Tarball<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer
            .len()
            .min(usize::try_from(self.content).unwrap_or(usize::MAX));
        let read = self.source.read(&mut buffer[..length])?;
        self.content -= read as u64;
        Ok(read)
    }
}

/// Values of extended headers for the next member.
#[derive(Default)]
struct ExtendedHeader {
    path: Option<Vec<u8>>,
    size: Option<u64>,
    sparse: bool,
}

impl ExtendedHeader {
    fn pax(&mut self, mut content: &[u8]) -> Result<(), Reason> {
        while !content.is_empty() {
            let (key, value, rest) = record(content).ok_or("an extended header is damaged")?;
            content = rest;
            match key {
                b"path" if !self.sparse => self.path = Some(value.to_vec()),
                b"size" => {
                    let text = std::str::from_utf8(value).ok();
                    let size = text.and_then(|text| text.parse().ok());
                    self.size = Some(size.ok_or("a size in the archive is not a number")?);
                }
                b"GNU.sparse.name" => {
                    self.path = Some(value.to_vec());
                    self.sparse = true;
                }
                key if key.starts_with(b"GNU.sparse.") => self.sparse = true,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Splits off the first record, `LENGTH KEY=VALUE\n`: key, value and the rest (POSIX, pax Extended Header). The crate
/// `tar` ends a record at its first line break, but an extended attribute may contain line breaks.
fn record(content: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let blank = content.iter().position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&content[..blank]).ok()?.parse().ok()?;
    let (record, rest) = content.split_at_checked(length)?;
    let record = record.get(blank + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], rest))
}

fn zero_ended(mut text: Vec<u8>) -> Vec<u8> {
    text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(text.len()));
    text
}

/// Normalises a path below the archive's root.
pub(super) fn plain(path: &[u8]) -> Result<PathBuf, Reason> {
    let mut plain = PathBuf::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => {
                return Err(format!(
                    "the path {:?} leads out of the archive",
                    String::from_utf8_lossy(path)
                ));
            }
            part => plain.push(OsStr::from_bytes(part)),
        }
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pax_records_have_a_length_and_any_value() {
        let with_length = |text: &str| {
            // The length counts its own digits: two of them here.
            format!("{} {text}\n", text.len() + 4)
        };
        let records = ["SCHILY.xattr.a=x\ny\n", "path=disk\n", "size=98765"].map(with_length);
        let mut extended = ExtendedHeader::default();
        extended.pax(records.concat().as_bytes()).unwrap();
        assert_eq!(extended.path.as_deref(), Some(&b"disk\n"[..]));
        assert_eq!((extended.size, extended.sparse), (Some(98_765), false));
        let records = [
            "GNU.sparse.major=1",
            "GNU.sparse.name=disk/a.img",
            "path=GNUSparse",
        ]
        .map(with_length);
        let mut extended = ExtendedHeader::default();
        extended.pax(records.concat().as_bytes()).unwrap();
        assert!(extended.sparse && extended.path.as_deref() == Some(&b"disk/a.img"[..]));
        for bad in [
            &b"0 "[..],
            b"3 a\n",
            b"99 path=a\n",
            b"path=a\n",
            b"9 path=ab",
            b"11 path=disk",
            b"18446744073709551616 a=b\n",
            b"12 size=many\n",
        ] {
            assert!(ExtendedHeader::default().pax(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn paths_stay_below_the_root() {
        assert_eq!(plain(b"./disk//a/").unwrap(), PathBuf::from("disk/a"));
        assert_eq!(plain(b"/disk/a").unwrap(), PathBuf::from("disk/a"));
        assert_eq!(plain(b"./").unwrap(), PathBuf::new());
        for bad in [&b".."[..], b"a/../b", b"/../a", b"a/.."] {
            assert!(plain(bad).is_err());
        }
    }
}
