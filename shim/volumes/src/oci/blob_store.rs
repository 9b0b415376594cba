//! Files of a container image: in a directory, or members of an archive.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, OFlags};

use super::super::error::{Reason, VolumeFault};
use super::super::path_handle::PathHandle;
use super::tarball::{self, Skip, Tarball};

/// Limit for the members of an archive.
const MAX_MEMBERS: usize = 65_536;
/// The index of an OCI image layout.
const INDEX: &str = "index.json";

/// Files of an image by path.
#[derive(Debug)]
pub(super) enum BlobStore {
    Layout(PathHandle),
    Archive {
        file: File,
        /// Offset and size of each file.
        members: HashMap<PathBuf, (u64, u64)>,
    },
}

impl BlobStore {
    /// Opens the image; `None` if this is not one.
    pub(super) fn find(given: &PathHandle) -> Result<Option<BlobStore>, VolumeFault> {
        if given.is_directory() {
            let index = given.child(Path::new(INDEX)).is_ok();
            let folder = given
                .child(Path::new("blobs"))
                .is_ok_and(|blobs| blobs.is_directory());
            if index && folder {
                let layout = given.try_clone().map_err(VolumeFault::io(&given.path))?;
                return Ok(Some(BlobStore::Layout(layout)));
            }
            return Ok(None);
        }
        if given.kind != FileType::RegularFile {
            return Ok(None);
        }
        let file = File::from(given.open(OFlags::RDONLY).map_err(VolumeFault::io(&given.path))?);
        let mut head = [0; tarball::BLOCK];
        match file.read_exact_at(&mut head, 0) {
            Ok(()) if tarball::is_header(&head) => {}
            _ => return Ok(None),
        }
        let size = file.metadata().map_err(VolumeFault::io(&given.path))?.len();
        let copy = file.try_clone().map_err(VolumeFault::io(&given.path))?;
        let members = members(FileSection::new(copy, 0, size))
            .map_err(|reason| VolumeFault::container_image(&given.path, reason))?;
        Ok(Some(BlobStore::Archive { file, members }))
    }

    pub(super) fn open(&self, name: &Path) -> Result<FileSection, Reason> {
        let missing = |error: io::Error| format!("{}: {error}", name.display());
        match self {
            BlobStore::Layout(directory) => {
                let found = directory.child(name).map_err(missing)?;
                if found.kind != FileType::RegularFile {
                    let kind = super::super::path_handle::describe(found.kind);
                    return Err(format!("{} is {kind}, not a regular file", name.display()));
                }
                let file = File::from(found.open(OFlags::RDONLY).map_err(missing)?);
                let size = file.metadata().map_err(missing)?.len();
                Ok(FileSection::new(file, 0, size))
            }
            BlobStore::Archive { file, members } => {
                let (offset, size) = members
                    .get(name)
                    .ok_or_else(|| format!("it has no {}", name.display()))?;
                let file = file.try_clone().map_err(missing)?;
                Ok(FileSection::new(file, *offset, offset + size))
            }
        }
    }

    pub(super) fn has(&self, name: &Path) -> bool {
        match self {
            BlobStore::Layout(directory) => directory.child(name).is_ok(),
            BlobStore::Archive { members, .. } => members.contains_key(name),
        }
    }

    /// True for an OCI image layout.
    pub(super) fn is_oci(&self) -> bool {
        self.has(Path::new(INDEX))
    }
}

/// Offset and size of each regular file in an archive.
fn members(archive: FileSection) -> Result<HashMap<PathBuf, (u64, u64)>, Reason> {
    let end = archive.end;
    let mut tarball = Tarball::new(archive);
    let mut members = HashMap::new();
    while let Some(entry) = tarball.next()? {
        if !entry.kind.is_file() {
            continue;
        }
        let offset = tarball.source().offset;
        if entry.size > end - offset {
            return Err(format!("the archive ends within {}", entry.path.display()));
        }
        if members.len() == MAX_MEMBERS {
            return Err(format!("the archive has more than {MAX_MEMBERS} members"));
        }
        members.insert(entry.path, (offset, entry.size));
    }
    Ok(members)
}

/// A section of a file.
#[derive(Debug)]
pub(super) struct FileSection {
    file: File,
    offset: u64,
    end: u64,
}

impl FileSection {
    fn new(file: File, offset: u64, end: u64) -> FileSection {
        FileSection { file, offset, end }
    }

    /// Remaining bytes.
    pub(super) fn left(&self) -> u64 {
        self.end - self.offset
    }
}

impl Read for FileSection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = buffer
            .len()
            .min(usize::try_from(self.left()).unwrap_or(usize::MAX));
        let read = self.file.read_at(&mut buffer[..length], self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

impl Skip for FileSection {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        if bytes > self.left() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.offset += bytes;
        Ok(())
    }
}
