//! Searches the layers for the disk, from the lowest to the highest, and applies whiteouts.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::fstatvfs;
use sha2::digest::DynDigest;
use tar::EntryType;

use super::super::error::Reason;
use super::super::sparse_writer::SparseWriter;
use super::ImageFile;
use super::blob_store::BlobStore;
use super::decompress::{LimitedReader, decompress};
use super::manifest::{Layer, LayerDigest, check, hasher};
use super::tarball::{Entry, Tarball};

/// Limit for candidates in the folder `disk`, of which an upper layer may remove all but one.
const MAX_CANDIDATES: usize = 8;
/// Limit for extracted files, with those that an upper layer replaces.
const MAX_EXTRACTED: usize = 4096;
/// Bytes between two progress reports.
const STEP: u64 = 16 << 20;
/// Bytes left free in the scratch directory.
const RESERVE: u64 = 64 << 20;
/// Prefix of a whiteout file, which removes the file of the remaining name (OCI image layer specification,
/// "Whiteouts").
const WHITEOUT: &[u8] = b".wh.";
/// Opaque whiteout: hides the directory's files of lower layers.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// State of the search.
pub(super) struct LayerSearch<'a> {
    pub(super) wanted: &'a [ImageFile],
    pub(super) place: &'a dyn Place,
    pub(super) found: BTreeMap<PathBuf, Candidate>,
    /// Bytes that may still be decompressed.
    pub(super) left: u64,
    /// Files extracted so far.
    pub(super) extracted: usize,
}

/// Where extracted files are created.
pub(super) trait Place {
    /// Creates an empty file.
    fn create(&self) -> Result<Extracted, Reason>;
    /// The directory, for errors.
    fn path(&self) -> &Path;
}

/// An extracted file, and its name in the place if it has one.
pub(super) struct Extracted {
    pub(super) file: File,
    pub(super) name: Option<PathBuf>,
}

/// A file at a path where a wanted one may be.
pub(super) struct Candidate {
    layer: usize,
    pub(super) what: CandidateContent,
}

pub(super) enum CandidateContent {
    /// A regular file's content.
    File(Extracted),
    /// Another type of file, in words.
    Other(&'static str),
}

impl LayerSearch<'_> {
    /// Applies one more layer.
    pub(super) fn layer(
        &mut self,
        number: usize,
        layer: &Layer,
        store: &BlobStore,
        progress: &dyn Fn(u64),
    ) -> Result<(), Reason> {
        let (packed, unpacked) = match &layer.digest {
            LayerDigest::Blob(digest) => (Some(digest), None),
            LayerDigest::DiffId(digest) => (None, Some(digest)),
        };
        let text = |error: io::Error| error.to_string();
        let mut source = HashingReader::new(
            store.open(&layer.part)?,
            packed.map(hasher).transpose()?,
            progress,
        );
        {
            let mut left = self.left;
            let plain = HashingReader::new(
                decompress(&mut source).map_err(text)?,
                unpacked.map(hasher).transpose()?,
                &|_| {},
            );
            let mut tarball = Tarball::new(LimitedReader {
                source: plain,
                left: &mut left,
            });
            while let Some(entry) = tarball.next()? {
                self.entry(number, entry, &mut tarball)?;
            }
            let mut rest = tarball.into_source();
            if let Some(digest) = unpacked {
                io::copy(&mut rest, &mut io::sink()).map_err(text)?;
                rest.source.check(digest)?;
            }
            self.left = left;
        }
        if let Some(digest) = packed {
            io::copy(&mut source, &mut io::sink()).map_err(text)?;
            source.check(digest)?;
        }
        Ok(())
    }

    fn entry(&mut self, layer: usize, entry: Entry, content: &mut impl Read) -> Result<(), Reason> {
        let path = &entry.path;
        let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else {
            return Ok(());
        };
        let name = name.as_bytes();
        if name == OPAQUE {
            self.remove(|path, found| found.layer != layer && path.starts_with(parent));
            return Ok(());
        }
        if let Some(removed) = name.strip_prefix(WHITEOUT) {
            let removed = parent.join(OsStr::from_bytes(removed));
            self.remove(|path, found| found.layer != layer && path.starts_with(&removed));
            return Ok(());
        }
        if !entry.kind.is_dir() {
            // A file replaces a file, or a directory of a lower layer.
            self.remove(|found, _| found.starts_with(path));
        }
        if !self.is_wanted(path) {
            return Ok(());
        }
        self.remove(|found, _| found == path);
        let what = match entry.kind {
            _ if entry.sparse => CandidateContent::Other("stored as a sparse file"),
            EntryType::Regular | EntryType::Continuous => {
                CandidateContent::File(self.unpack(&entry, content)?)
            }
            EntryType::Directory => CandidateContent::Other("a directory"),
            EntryType::Symlink => CandidateContent::Other("a symbolic link"),
            EntryType::Link => CandidateContent::Other("a hard link"),
            EntryType::Fifo => CandidateContent::Other("a FIFO"),
            EntryType::Char | EntryType::Block => CandidateContent::Other("a device"),
            _ => CandidateContent::Other("a file of unknown type"),
        };
        self.found.insert(entry.path, Candidate { layer, what });
        if self.found.len() > self.wanted.len() + MAX_CANDIDATES {
            return Err(format!(
                "it has more than {MAX_CANDIDATES} files in folder disk, only one disk is allowed"
            ));
        }
        Ok(())
    }

    /// Forgets candidates, and removes their files.
    fn remove(&mut self, gone: impl Fn(&Path, &Candidate) -> bool) {
        self.found.retain(|path, candidate| {
            let gone = gone(path, candidate);
            if gone
                && let CandidateContent::File(extracted) = &candidate.what
                && let Some(name) = &extracted.name
            {
                let _ = fs::remove_file(name);
            }
            !gone
        });
    }

    fn is_wanted(&self, path: &Path) -> bool {
        self.wanted.iter().any(|wanted| wanted.matches(path))
    }

    fn unpack(&mut self, entry: &Entry, content: &mut impl Read) -> Result<Extracted, Reason> {
        self.extracted += 1;
        if self.extracted > MAX_EXTRACTED {
            return Err(format!(
                "its wanted files are more than {MAX_EXTRACTED}, with those that others replace"
            ));
        }
        let extracted = self.place.create()?;
        let space = fstatvfs(&extracted.file).map_err(|error| error.to_string())?;
        let room = space
            .f_bavail
            .saturating_mul(space.f_frsize)
            .saturating_sub(RESERVE);
        let mut writer = SparseWriter::new(&extracted.file, room);
        let copied =
            io::copy(&mut content.take(entry.size), &mut writer).map_err(|error| match error.kind() {
                io::ErrorKind::StorageFull => format!(
                    "{} does not fit into {}, which has room for {} MiB",
                    entry.path.display(),
                    self.place.path().display(),
                    room >> 20
                ),
                _ => format!("{}: {error}", entry.path.display()),
            })?;
        if copied != entry.size {
            return Err(format!("it ends within {}", entry.path.display()));
        }
        writer.finish().map_err(|error| error.to_string())?;
        Ok(extracted)
    }
}

/// Counts and optionally hashes what is read.
struct HashingReader<'a, R> {
    source: R,
    hasher: Option<Box<dyn DynDigest>>,
    read: u64,
    reported: u64,
    progress: &'a dyn Fn(u64),
}

impl<'a, R: Read> HashingReader<'a, R> {
    fn new(source: R, hasher: Option<Box<dyn DynDigest>>, progress: &'a dyn Fn(u64)) -> HashingReader<'a, R> {
        HashingReader {
            source,
            hasher,
            read: 0,
            reported: 0,
            progress,
        }
    }

    fn check(self, digest: &oci_spec::image::Digest) -> Result<(), Reason> {
        self.hasher.map_or(Ok(()), |hasher| check(digest, hasher))
    }
}

impl<R: Read> Read for HashingReader<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&buffer[..read]);
        }
        self.read += read as u64;
        if self.read - self.reported >= STEP {
            self.reported = self.read;
            (self.progress)(self.read);
        }
        Ok(read)
    }
}
