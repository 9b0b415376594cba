//! Digests of the chunks of a file, by several threads.
//!
//! Holes are not read: they are zeros. So a copy of a file has the digests of the file, with holes or without.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use husk_volumes::next_data;
use sha2::{Digest, Sha256};

use super::error::SnapshotError;

/// Size of a chunk in bytes. The last one of a file may be shorter.
pub(super) const CHUNK: u64 = 1 << 20;
/// Size of a digest in bytes.
pub(super) const DIGEST: u64 = 32;
/// Chunks that a thread takes at once.
const BATCH: u64 = 16;
/// Maximum number of threads: each has a buffer of a chunk.
const MOST_THREADS: usize = 4;

/// SHA-256 of a chunk.
pub(super) type ChunkDigest = [u8; DIGEST as usize];

/// Takes a batch of digests, with the number of its first chunk.
pub(super) type TakeBatch<'a> = dyn Fn(u64, &[ChunkDigest]) -> Result<AfterBatch, SnapshotError> + Sync + 'a;

/// The digest of a whole chunk of zeros.
static ZEROS: LazyLock<ChunkDigest> = LazyLock::new(|| zeros(CHUNK));

/// A file whose chunks are digested.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkedFile<'a> {
    pub(super) file: &'a File,
    /// For errors.
    pub(super) path: &'a Path,
    /// Its size.
    pub(super) bytes: u64,
}

/// The receiver of a batch of digests answers if it takes more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterBatch {
    /// It takes the next batch.
    GoOn,
    /// It takes no more.
    End,
}

impl ChunkedFile<'_> {
    /// Passes the digests of all chunks to `take`, in batches. Several threads call it, and later batches may come before
    /// earlier ones. If one answers [`AfterBatch::End`], all earlier batches are still passed. `progress` gets the bytes
    /// that were read since its last call. Ends soon after `cancelled` is set. Blocks.
    ///
    /// # Errors
    /// The file cannot be read or has become shorter, `take` failed, or it was cancelled.
    pub(super) fn digest(
        self,
        cancelled: &AtomicBool,
        take: &TakeBatch<'_>,
        mut progress: impl FnMut(u64),
    ) -> Result<(), SnapshotError> {
        let chunks = self.bytes.div_ceil(CHUNK);
        let work = Work {
            chunked: self,
            chunks,
            next: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            cancelled,
            take,
        };
        let batches = usize::try_from(chunks.div_ceil(BATCH)).unwrap_or(usize::MAX);
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.min(MOST_THREADS).min(batches);
        let (reports, reported) = channel();
        thread::scope(|scope| {
            let mut done = Ok(());
            for _ in 0..threads {
                let (work, reports) = (&work, reports.clone());
                let thread = thread::Builder::new().name("digests".into());
                let spawned = thread.spawn_scoped(scope, move || work.run(&reports));
                if let Err(error) = spawned {
                    work.ended.store(true, Ordering::Relaxed);
                    done = Err(SnapshotError::io(self.path)(error));
                    break;
                }
            }
            drop(reports);
            for report in reported {
                match report {
                    Ok(read) => progress(read),
                    Err(error) => done = done.and(Err(error)),
                }
            }
            done
        })
    }

    /// The digests of the chunks from `first` up to `end`, and the number of bytes read for them.
    fn batch(
        self,
        (first, end): (u64, u64),
        buffer: &mut [u8],
        cancelled: &AtomicBool,
    ) -> io::Result<(Vec<ChunkDigest>, u64)> {
        let (mut digests, mut read) = (Vec::new(), 0);
        // The range of data that is not behind the chunk.
        let mut data = (0, 0);
        for chunk in first..end {
            let start = chunk * CHUNK;
            let length = CHUNK.min(self.bytes - start);
            if data.1 <= start {
                data = next_data(self.file, start, self.bytes)?.unwrap_or((self.bytes, self.bytes));
            }
            if data.0 >= start + length {
                digests.push(if length == CHUNK { *ZEROS } else { zeros(length) });
                continue;
            }
            if cancelled.load(Ordering::Relaxed) {
                return Err(ErrorKind::Interrupted.into());
            }
            let part = &mut buffer[..length as usize];
            self.file.read_exact_at(part, start)?;
            digests.push(Sha256::digest(part).into());
            read += length;
        }
        Ok((digests, read))
    }
}

/// The work on one file, which threads share.
struct Work<'a> {
    chunked: ChunkedFile<'a>,
    chunks: u64,
    /// First chunk of the next batch.
    next: AtomicU64,
    /// No further batch is needed.
    ended: AtomicBool,
    cancelled: &'a AtomicBool,
    take: &'a TakeBatch<'a>,
}

impl Work<'_> {
    /// Works until no batch is left. Reports the bytes read, or the error that ends the work.
    fn run(&self, reports: &Sender<Result<u64, SnapshotError>>) {
        let mut buffer = vec![0; CHUNK as usize];
        while !self.ended.load(Ordering::Relaxed) {
            let first = self.next.fetch_add(BATCH, Ordering::Relaxed);
            if first >= self.chunks {
                return;
            }
            let end = (first + BATCH).min(self.chunks);
            let report = match self.batch((first, end), &mut buffer) {
                Ok((AfterBatch::GoOn, read)) => Ok(read),
                Ok((AfterBatch::End, read)) => {
                    self.ended.store(true, Ordering::Relaxed);
                    Ok(read)
                }
                Err(error) => {
                    self.ended.store(true, Ordering::Relaxed);
                    Err(error)
                }
            };
            let _ = reports.send(report);
        }
    }

    fn batch(&self, (first, end): (u64, u64), buffer: &mut [u8]) -> Result<(AfterBatch, u64), SnapshotError> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(SnapshotError::io(self.chunked.path)(ErrorKind::Interrupted));
        }
        let batch = self.chunked.batch((first, end), buffer, self.cancelled);
        let (digests, read) = batch.map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof => {
                SnapshotError::io(self.chunked.path)(io::Error::other("it has become shorter"))
            }
            _ => SnapshotError::io(self.chunked.path)(error),
        })?;
        Ok(((self.take)(first, &digests)?, read))
    }
}

/// The digest of so many zeros, of which there are a chunk at most.
fn zeros(length: u64) -> ChunkDigest {
    Sha256::digest(vec![0; length as usize]).into()
}
