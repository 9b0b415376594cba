//! The lock of a store: nothing is put into it while another process decides what to remove.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::StoreError;
use crate::store::make_directory;

/// Maximum time to wait for the lock, under which little is written and no data removed.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time between two attempts.
const RETRY: Duration = Duration::from_millis(20);

/// The lock, held as long as this exists.
#[derive(Debug)]
pub(crate) struct StoreLock {
    _file: File,
}

impl StoreLock {
    /// For a process that puts images and names into the store.
    pub(crate) fn shared(store: &Path) -> Result<StoreLock, StoreError> {
        StoreLock::take(store, FlockOperation::NonBlockingLockShared)
    }

    /// For a process that removes some. Blocks.
    pub(crate) fn exclusive(store: &Path) -> Result<StoreLock, StoreError> {
        StoreLock::take(store, FlockOperation::NonBlockingLockExclusive)
    }

    fn take(store: &Path, operation: FlockOperation) -> Result<StoreLock, StoreError> {
        make_directory(store)?;
        let path = store.join(".lock");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(StoreError::io(&path))?;
        let limit = Instant::now() + TIMEOUT;
        loop {
            match flock(&file, operation) {
                Ok(()) => return Ok(StoreLock { _file: file }),
                Err(Errno::WOULDBLOCK) if Instant::now() < limit => std::thread::sleep(RETRY),
                Err(Errno::WOULDBLOCK) => return Err(StoreError::Locked(path)),
                Err(error) => return Err(StoreError::errno(&path)(error)),
            }
        }
    }
}
