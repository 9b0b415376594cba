//! Common interface of the filesystems.

use thiserror::Error;

/// Largest configuration file read.
pub(crate) const MAX_CONFIG: u64 = 1 << 20;
/// Names taken from one directory.
pub(crate) const MAX_NAMES: usize = 4096;
/// Longest path looked up, in bytes.
pub(crate) const MAX_PATH: usize = 4096;
/// Bytes handed to a sink at a time; only the last piece of a file is shorter.
pub(crate) const CHUNK: usize = 256 << 10;

/// Error of accessing a file or directory.
#[derive(Debug, Error)]
pub(crate) enum VolumeError {
    #[error("not found")]
    NotFound,
    #[error("not a regular file")]
    NotAFile,
    #[error("is {0} bytes, more than the {1} allowed")]
    TooLarge(u64, u64),
    #[error("{0}")]
    Filesystem(String),
    #[error("ends after {0} of {1} bytes")]
    Truncated(u64, u64),
    #[error("the filesystem reader panicked")]
    Panicked,
    #[error("{0}")]
    Sink(std::io::Error),
}

impl VolumeError {
    /// True if the filesystem is damaged or not supported.
    pub(crate) fn is_damage(&self) -> bool {
        matches!(self, Self::Filesystem(_) | Self::Truncated(..) | Self::Panicked)
    }
}

/// Takes a file's bytes piece by piece.
pub(crate) type Sink<'a> = dyn FnMut(&[u8]) -> std::io::Result<()> + 'a;

/// Read-only access by absolute path. Implementations bound every read and allocation by the requested size.
pub(crate) trait Volume {
    /// Identifier as `search --fs-uuid` compares it, ignoring case.
    fn uuid(&self) -> &str;
    /// Label, empty if there is none.
    fn label(&self) -> &str;
    /// Warning about this filesystem, such as a journal that could not be replayed.
    fn note(&self) -> Option<&str> {
        None
    }
    /// Names in a directory, at most [`MAX_NAMES`].
    fn list(&self, path: &str) -> Result<Vec<String>, VolumeError>;
    /// Size of a regular file in bytes.
    fn size(&self, path: &str) -> Result<u64, VolumeError>;
    /// Hands the whole file, which must be `size` bytes long, to `sink` in pieces of [`CHUNK`] bytes.
    fn stream(&self, path: &str, size: u64, sink: &mut Sink<'_>) -> Result<(), VolumeError>;
}

/// Reads a whole small file.
pub(crate) fn read(volume: &dyn Volume, path: &str, limit: u64) -> Result<Vec<u8>, VolumeError> {
    let size = volume.size(path)?;
    if size > limit {
        return Err(VolumeError::TooLarge(size, limit));
    }
    let mut bytes = Vec::with_capacity(size as usize);
    volume.stream(path, size, &mut |piece| {
        bytes.extend_from_slice(piece);
        Ok(())
    })?;
    Ok(bytes)
}

/// Cleans a path: one slash between components, no `.`, `..` resolved, at most [`MAX_PATH`] bytes.
pub(crate) fn normalise(path: &str) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    let clean = format!("/{}", parts.join("/"));
    (clean.len() <= MAX_PATH && !clean.contains('\0')).then_some(clean)
}

/// Fills `CHUNK`-sized pieces from `read`, which returns 0 at the end, until `size` bytes went to `sink`.
pub(crate) fn stream_chunks(
    size: u64,
    sink: &mut Sink<'_>,
    mut read: impl FnMut(&mut [u8]) -> Result<usize, VolumeError>,
) -> Result<(), VolumeError> {
    let mut buf = vec![0; size.min(CHUNK as u64) as usize];
    let mut done = 0;
    while done < size {
        let piece = &mut buf[..(size - done).min(CHUNK as u64) as usize];
        let mut filled = 0;
        while filled < piece.len() {
            match read(&mut piece[filled..])? {
                0 => return Err(VolumeError::Truncated(done + filled as u64, size)),
                n => filled += n,
            }
        }
        sink(piece).map_err(VolumeError::Sink)?;
        done += piece.len() as u64;
    }
    Ok(())
}
