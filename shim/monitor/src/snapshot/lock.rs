//! Locks of a snapshot's files, also on file systems that have no locks.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use husk_volumes::reopen;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use tracing::warn;

/// The answer to an attempt to lock a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LockAnswer {
    Locked,
    /// Another process holds it.
    Held,
    /// The file system does not lock this file.
    Unsupported(Errno),
}

/// Tries to lock an open file. The lock lasts until its last descriptor is closed.
pub(super) fn try_lock(file: impl AsFd, operation: FlockOperation) -> io::Result<LockAnswer> {
    answer(flock(file, operation))
}

fn answer(locked: Result<(), Errno>) -> io::Result<LockAnswer> {
    match locked {
        Ok(()) => Ok(LockAnswer::Locked),
        Err(Errno::WOULDBLOCK) => Ok(LockAnswer::Held),
        // NFS: a file that is open for reading has no exclusive lock.
        Err(errno @ (Errno::BADF | Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS)) => {
            Ok(LockAnswer::Unsupported(errno))
        }
        Err(error) => Err(error.into()),
    }
}

/// Opens an open file for reading and writing.
pub(super) fn writable(file: &File) -> io::Result<File> {
    reopen(file, OFlags::RDWR).map(File::from)
}

/// Locks a file exclusively; `None` if another process holds the lock. `writable` opens it again where the file system
/// locks only a file that is open for writing. If the file system has no locks, warns and returns the file unlocked.
pub(super) fn lock_exclusively(
    file: File,
    path: &Path,
    writable: impl FnOnce(&File) -> io::Result<File>,
    lock: impl Fn(&File) -> io::Result<LockAnswer>,
) -> io::Result<Option<File>> {
    let mut error = match lock(&file)? {
        LockAnswer::Locked => return Ok(Some(file)),
        LockAnswer::Held => return Ok(None),
        LockAnswer::Unsupported(error) => error,
    };
    if error == Errno::BADF
        && let Ok(writable) = writable(&file)
    {
        match lock(&writable)? {
            LockAnswer::Locked => return Ok(Some(writable)),
            LockAnswer::Held => return Ok(None),
            LockAnswer::Unsupported(other) => error = other,
        }
    }
    warn_not_locked(path, error);
    Ok(Some(file))
}

/// Warns that a snapshot is not locked.
pub(super) fn warn_not_locked(path: &Path, error: Errno) {
    let path = path.display();
    warn!(%path, %error, "the file system does not lock the snapshot: two commands could use it at once");
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::fs::fcntl_getfl;

    use super::*;

    #[test]
    fn file_systems_without_locks_are_told_from_files_in_use() {
        use LockAnswer::{Held, Locked, Unsupported};
        assert_eq!(answer(Ok(())).unwrap(), Locked);
        assert_eq!(answer(Err(Errno::WOULDBLOCK)).unwrap(), Held);
        for errno in [Errno::BADF, Errno::NOLCK, Errno::OPNOTSUPP, Errno::NOSYS] {
            assert_eq!(answer(Err(errno)).unwrap(), Unsupported(errno));
        }
        let error = answer(Err(Errno::IO)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    }

    #[test]
    fn exclusive_lock_is_of_a_writable_file_where_it_must_be() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("memory");
        std::fs::write(&path, "abcd").unwrap();
        let reader = || File::open(&path).unwrap();
        let denied = |_: &File| Err(io::ErrorKind::PermissionDenied.into());
        let is_writable = |file: &File| fcntl_getfl(file).unwrap().contains(OFlags::RDWR);
        // As NFS, whose locks are of byte ranges.
        let nfs = |file: &File| match is_writable(file) {
            true => try_lock(file, FlockOperation::NonBlockingLockExclusive),
            false => answer(Err(Errno::BADF)),
        };
        let locked = lock_exclusively(reader(), &path, writable, nfs).unwrap().unwrap();
        assert!(is_writable(&locked));
        assert!(
            lock_exclusively(reader(), &path, writable, nfs)
                .unwrap()
                .is_none()
        );
        drop(locked);
        let (file, without) = (reader(), |_: &File| answer(Err(Errno::NOLCK)));
        let descriptor = file.as_raw_fd();
        let file = lock_exclusively(file, &path, denied, nfs).unwrap().unwrap();
        let file = lock_exclusively(file, &path, writable, without).unwrap().unwrap();
        assert_eq!(file.as_raw_fd(), descriptor, "the file without a lock");
        // The usual file systems lock a file that is open for reading.
        let usual = |file: &File| try_lock(file, FlockOperation::NonBlockingLockExclusive);
        let file = lock_exclusively(file, &path, writable, usual).unwrap().unwrap();
        assert!(!is_writable(&file));
    }
}
