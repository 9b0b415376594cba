//! Whose a runtime directory is.
//!
//! Directories are moved and deleted in it, so one that the user names must be Husk's from its beginning: empty, or
//! with the lock file that says so.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use super::{LOCK, RuntimeDir, StateError};

/// What the lock file of a runtime directory says.
const MARK: &[u8] = b"Husk keeps the state of its VMs in this directory.\n";

/// What named a runtime directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// `HUSK_RUNTIME_DIR`.
    Variable,
    /// `XDG_RUNTIME_DIR`, below which the name is Husk's own.
    Session,
    /// A rule, or the program.
    Standard,
}

impl RuntimeDir {
    /// Refuses what is not for VMs; a directory that is not there is.
    pub(super) fn check(&self) -> Result<(), StateError> {
        if !self.path.is_absolute() {
            return Err(self.unfit("is a relative path"));
        }
        let meta = match fs::metadata(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(self.unusable())?,
        };
        if !meta.is_dir() {
            return Err(self.unfit("is not a directory"));
        }
        if meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(self.unfit("belongs to another user"));
        }
        if meta.mode() & 0o022 != 0 {
            return Err(self.unfit("can be written by other users"));
        }
        if self.origin == Origin::Variable && !self.is_marked() {
            for entry in fs::read_dir(&self.path).map_err(self.unusable())?.flatten() {
                if entry.file_name() != LOCK {
                    let name = entry.file_name();
                    return Err(self.unfit(&format!("is used for something else, as {name:?} in it shows")));
                }
            }
        }
        Ok(())
    }

    /// Says whose the directory is, before anything else is made in it.
    pub(super) fn mark(&self, lock: &mut File) -> Result<(), StateError> {
        if self.is_marked() {
            return Ok(());
        }
        let written = lock.set_len(0).and_then(|()| lock.write_all(MARK));
        written.map_err(StateError::io(&self.path.join(LOCK)))
    }

    fn is_marked(&self) -> bool {
        let mut text = Vec::new();
        let read = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(self.path.join(LOCK))
            .and_then(|lock| lock.take(MARK.len() as u64).read_to_end(&mut text));
        read.is_ok() && text == MARK
    }

    fn unfit(&self, why: &str) -> StateError {
        StateError::Unfit {
            place: self.place(),
            why: why.to_owned(),
        }
    }

    pub(super) fn unusable(&self) -> impl FnOnce(io::Error) -> StateError {
        let place = self.place();
        move |source| StateError::Unusable { place, source }
    }

    /// The directory, and what named it.
    fn place(&self) -> String {
        let path = self.path.display();
        match self.origin {
            Origin::Variable => format!("HUSK_RUNTIME_DIR={path}"),
            Origin::Session => format!("{path} (below XDG_RUNTIME_DIR)"),
            Origin::Standard => path.to_string(),
        }
    }
}
