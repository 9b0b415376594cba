//! Files and directories that are being removed from a store.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::StoreError;
use crate::staging::is_at;
use crate::store::{ImageStore, MAX_DEPTH, allocated, make_directory};

/// Start of the names of such directories.
const PREFIX: &str = "trash-";

/// A directory that is no longer part of the store. It is locked: its data is removed when others have the store again.
#[derive(Debug)]
pub(crate) struct Trash {
    path: PathBuf,
    bytes: u64,
    _lock: File,
}

impl Trash {
    /// Moves a directory into staging, so that a power cut leaves it whole or there. `None` if it does not exist, or if
    /// a pull or another process that removes something has it. The caller holds the store's lock.
    pub(crate) fn of(store: &ImageStore, directory: &Path) -> Result<Option<Trash>, StoreError> {
        let lock = match File::open(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(StoreError::io(directory))?,
        };
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => return Ok(None),
            other => other.map_err(StoreError::errno(directory))?,
        }
        // A pull may have finished the image before, and another have begun to pull it again.
        if !is_at(&lock, directory).map_err(StoreError::io(directory))? {
            return Ok(None);
        }
        let bytes = allocated(directory, MAX_DEPTH);
        let staging = store.staging();
        make_directory(&staging)?;
        let name = directory.file_name().and_then(|name| name.to_str());
        let path = match name.is_some_and(|name| name.starts_with(PREFIX)) {
            true => directory.to_owned(),
            false => {
                let path = (0_u32..=u32::MAX)
                    .map(|number| staging.join(format!("{PREFIX}{number}")))
                    .find(|trash| !trash.exists())
                    .unwrap_or_else(|| staging.join(PREFIX));
                fs::rename(directory, &path).map_err(StoreError::io(directory))?;
                path
            }
        };
        Ok(Some(Trash {
            path,
            bytes,
            _lock: lock,
        }))
    }

    /// Removes the data. Returns its allocated size.
    pub(crate) fn remove(self) -> Result<u64, StoreError> {
        fs::remove_dir_all(&self.path).map_err(StoreError::io(&self.path))?;
        Ok(self.bytes)
    }
}
