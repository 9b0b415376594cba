//! Checksums of the files of a snapshot, by which damage is found.
//!
//! The file `checksums` has the SHA-256 digest of each chunk of 1 MiB of each file, in the order of the description. The
//! description has the digest of `checksums` itself. Checksums show damage. They do not stop an
//! attacker, who can change them too.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::check::images;
use super::chunk_digests::{AfterBatch, CHUNK, ChunkDigest, ChunkedFile, DIGEST};
use super::directory::SnapshotDir;
use super::error::SnapshotError;
use super::format::{CHECKSUMS, MEMORY, STATE, SavedDisk, Snapshot};
use super::restore::sized;

/// Size of a block in `st_blocks`, in bytes.
const SECTOR: u64 = 512;

/// The description of the checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Checksums {
    /// SHA-256 of `checksums`, in hexadecimal digits.
    sha256: String,
    /// Size of a chunk in bytes.
    chunk_bytes: u64,
    /// The files, in the order of [`file_names`].
    files: Vec<SummedFile>,
}

/// A file with checksums.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct SummedFile {
    name: String,
    /// Its size.
    bytes: u64,
}

/// Names of the files that have checksums.
fn file_names(disks: &[SavedDisk]) -> impl Iterator<Item = &str> {
    let images = disks.iter().flat_map(|disk| images(&disk.content));
    let images = images.map(|image| image.file.as_str());
    [STATE, MEMORY].into_iter().chain(images)
}

impl Checksums {
    /// Writes the checksums of a snapshot whose files are complete into `sums`. `progress` is called with the bytes read
    /// and those that all files take on the disk. Ends soon after `cancelled` is set. Blocks.
    pub(crate) fn write(
        dir: &SnapshotDir,
        sums: &File,
        disks: &[SavedDisk],
        cancelled: &AtomicBool,
        progress: impl Fn(u64, u64),
    ) -> Result<Checksums, SnapshotError> {
        let sums_path = dir.path_of(CHECKSUMS);
        let files = file_names(disks).map(|name| OpenFile::new(dir, name, dir.file(name)?));
        let files = files.collect::<Result<Vec<_>, _>>()?;
        let total = files.iter().map(|file| file.used).sum::<u64>();
        let (mut at, mut done) = (0, 0_u64);
        progress(0, total);
        for open in &files {
            let take = |first: u64, digests: &[ChunkDigest]| {
                let written = sums.write_all_at(digests.as_flattened(), at + first * DIGEST);
                written.map_err(SnapshotError::io(&sums_path))?;
                Ok(AfterBatch::GoOn)
            };
            open.chunked().digest(cancelled, &take, |read| {
                done += read;
                progress(done.min(total), total);
            })?;
            at += open.bytes.div_ceil(CHUNK) * DIGEST;
        }
        sums.sync_all().map_err(SnapshotError::io(&sums_path))?;
        progress(total, total);
        Ok(Checksums {
            sha256: sha256(sums, cancelled).map_err(SnapshotError::io(&sums_path))?,
            chunk_bytes: CHUNK,
            files: files.into_iter().map(SummedFile::from).collect(),
        })
    }

    /// Checks what [`verify`] relies on.
    pub(super) fn check(&self, snapshot: &Snapshot) -> Result<(), String> {
        if self.chunk_bytes != CHUNK {
            return Err(format!(
                "chunkBytes: {} is unknown, not {CHUNK}",
                self.chunk_bytes
            ));
        }
        let names = self.files.iter().map(|file| file.name.as_str());
        if !names.eq(file_names(&snapshot.disks)) {
            return Err("files: they are not those of the snapshot".into());
        }
        let sizes = [snapshot.state_bytes, snapshot.memory_bytes];
        let mut sizes = self.files.iter().zip(sizes);
        if let Some((file, bytes)) = sizes.find(|(file, bytes)| file.bytes != *bytes) {
            return Err(format!(
                "files: {} has {} bytes, not {bytes}",
                file.name, file.bytes
            ));
        }
        match self.size() {
            Some(_) => Ok(()),
            None => Err("files: they are too large".into()),
        }
    }

    /// Size of the file `checksums` in bytes.
    fn size(&self) -> Option<u64> {
        let sizes = self.files.iter().map(|file| file.bytes.div_ceil(CHUNK) * DIGEST);
        sizes.into_iter().try_fold(0, u64::checked_add)
    }
}

/// Compares all files of a snapshot with their checksums. Images that are not in the snapshot are not read. `progress` is
/// called with the name of a file, the bytes of it that were read and those that it takes on the disk. Ends soon after
/// `cancelled` is set. Blocks.
///
/// # Errors
/// The snapshot has no checksums, or one of its files is not what was written: the error names it, and the offset of the
/// first wrong chunk.
pub fn verify(
    directory: &Path,
    cancelled: &AtomicBool,
    progress: &dyn Fn(&str, u64, u64),
) -> Result<(), SnapshotError> {
    let dir = SnapshotDir::open(directory)?;
    let snapshot = dir.read()?;
    let checksums = snapshot.checksums(directory)?;
    let sums = sized(&dir, CHECKSUMS, checksums.size().unwrap_or(u64::MAX))?;
    let sums_path = dir.path_of(CHECKSUMS);
    if sha256(&sums, cancelled).map_err(SnapshotError::io(&sums_path))? != checksums.sha256 {
        return Err(SnapshotError::WrongChecksums(sums_path));
    }
    // A file that is missing or too short is found at once.
    let files = checksums.files.iter().map(|SummedFile { name, bytes }| {
        let file = sized(&dir, name, *bytes)?;
        OpenFile::new(&dir, name, file)
    });
    let files = files.collect::<Result<Vec<_>, _>>()?;
    let mut at = 0;
    for open in &files {
        let wrong = AtomicU64::new(u64::MAX);
        let take = |first: u64, digests: &[ChunkDigest]| {
            let mut wanted = vec![[0; DIGEST as usize]; digests.len()];
            let read = sums.read_exact_at(wanted.as_flattened_mut(), at + first * DIGEST);
            read.map_err(SnapshotError::io(&sums_path))?;
            let mut pairs = digests.iter().zip(&wanted);
            Ok(match pairs.position(|(digest, wanted)| digest != wanted) {
                Some(chunk) => {
                    wrong.fetch_min(first + chunk as u64, Ordering::Relaxed);
                    AfterBatch::End
                }
                None => AfterBatch::GoOn,
            })
        };
        let mut done = 0;
        progress(&open.name, 0, open.used);
        open.chunked().digest(cancelled, &take, |read| {
            done += read;
            progress(&open.name, done.min(open.used), open.used);
        })?;
        match wrong.into_inner() {
            u64::MAX => progress(&open.name, open.used, open.used),
            chunk => {
                return Err(SnapshotError::Damaged {
                    path: open.path.clone(),
                    offset: chunk * CHUNK,
                });
            }
        }
        at += open.bytes.div_ceil(CHUNK) * DIGEST;
    }
    Ok(())
}

/// SHA-256 of a file, in hexadecimal digits.
fn sha256(file: &File, cancelled: &AtomicBool) -> io::Result<String> {
    let start = FromStart {
        file,
        at: 0,
        cancelled,
    };
    let mut reader = BufReader::with_capacity(CHUNK as usize, start);
    let mut hash = Sha256::new();
    io::copy(&mut reader, &mut hash)?;
    Ok(format!("{:x}", hash.finalize()))
}

/// Reads a file from its start, wherever its position is. Fails once it is cancelled: a hostile file may be a hole of
/// any size.
struct FromStart<'a> {
    file: &'a File,
    at: u64,
    cancelled: &'a AtomicBool,
}

impl Read for FromStart<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(io::Error::other("it was cancelled"));
        }
        let read = self.file.read_at(buffer, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

/// A file of the snapshot.
struct OpenFile {
    name: String,
    file: File,
    path: PathBuf,
    /// Its size.
    bytes: u64,
    /// Bytes that it takes on the disk, up to its size.
    used: u64,
}

impl OpenFile {
    fn new(dir: &SnapshotDir, name: &str, file: File) -> Result<OpenFile, SnapshotError> {
        let path = dir.path_of(name);
        let stat = file.metadata().map_err(SnapshotError::io(&path))?;
        Ok(OpenFile {
            name: name.to_owned(),
            file,
            path,
            bytes: stat.len(),
            used: stat.len().min(stat.blocks().saturating_mul(SECTOR)),
        })
    }

    fn chunked(&self) -> ChunkedFile<'_> {
        ChunkedFile {
            file: &self.file,
            path: &self.path,
            bytes: self.bytes,
        }
    }
}

impl From<OpenFile> for SummedFile {
    fn from(open: OpenFile) -> SummedFile {
        SummedFile {
            name: open.name,
            bytes: open.bytes,
        }
    }
}
