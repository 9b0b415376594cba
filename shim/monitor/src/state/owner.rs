//! The owner and the mark of a runtime directory.
//!
//! Directories in it are moved and deleted. So a directory that the user names must be empty, or have a lock file with
//! Husk's mark.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::error::StateError;

/// The file that is locked while directories of VMs are made or removed.
pub(super) const LOCK: &str = ".lock";

/// The mark: the contents of the lock file.
const MARK: &[u8] = b"Husk keeps the state of its VMs in this directory.\n";

/// The source of a runtime directory's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// `HUSK_RUNTIME_DIR`.
    Variable,
    /// `XDG_RUNTIME_DIR`, in which Husk has a directory of its own.
    Session,
    /// The default, or the program.
    Standard,
}

impl Origin {
    /// Checks that a directory is suitable. One that does not exist is.
    pub(super) fn check(self, path: &Path) -> Result<(), StateError> {
        if !path.is_absolute() {
            return Err(self.unfit(path, "is a relative path"));
        }
        let meta = match fs::metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(self.unusable(path))?,
        };
        if !meta.is_dir() {
            return Err(self.unfit(path, "is not a directory"));
        }
        if meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(self.unfit(path, "belongs to another user"));
        }
        if meta.mode() & 0o022 != 0 {
            return Err(self.unfit(path, "can be written by other users"));
        }
        if self == Origin::Variable && !is_marked(path) {
            for entry in fs::read_dir(path).map_err(self.unusable(path))?.flatten() {
                if entry.file_name() != LOCK {
                    let name = entry.file_name();
                    return Err(self.unfit(
                        path,
                        &format!("is used for something else (it contains {name:?})"),
                    ));
                }
            }
        }
        Ok(())
    }

    fn unfit(self, path: &Path, why: &str) -> StateError {
        StateError::Unfit {
            place: self.place(path),
            why: why.to_owned(),
        }
    }

    pub(super) fn unusable(self, path: &Path) -> impl FnOnce(io::Error) -> StateError {
        let place = self.place(path);
        move |source| StateError::Unusable { place, source }
    }

    /// The directory, and the variable that named it.
    fn place(self, path: &Path) -> String {
        let path = path.display();
        match self {
            Origin::Variable => format!("HUSK_RUNTIME_DIR={path}"),
            Origin::Session => format!("{path} (below XDG_RUNTIME_DIR)"),
            Origin::Standard => path.to_string(),
        }
    }
}

/// Writes the mark, before anything else is created in the directory.
pub(super) fn mark(path: &Path, lock: &mut File) -> Result<(), StateError> {
    if is_marked(path) {
        return Ok(());
    }
    let written = lock.set_len(0).and_then(|()| lock.write_all(MARK));
    written.map_err(StateError::io(&path.join(LOCK)))
}

fn is_marked(path: &Path) -> bool {
    let mut text = Vec::new();
    let read = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path.join(LOCK))
        .and_then(|lock| lock.take(MARK.len() as u64).read_to_end(&mut text));
    read.is_ok() && text == MARK
}
