//! Scratch files that end with their VM.
//!
//! They have no name, so they vanish with the VMM however it ends. They are on disk, because the runtime directory is
//! usually a tmpfs.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use super::error::VolumeFault;

/// Scratch directory for ephemeral data.
#[derive(Debug, Clone)]
pub struct ScratchDir {
    directory: PathBuf,
    /// Set by `HUSK_SCRATCH_DIR`.
    chosen: bool,
}

impl ScratchDir {
    /// `HUSK_SCRATCH_DIR`, else `/var/tmp`.
    #[must_use]
    pub fn locate() -> ScratchDir {
        let set = std::env::var_os("HUSK_SCRATCH_DIR").filter(|value| !value.is_empty());
        ScratchDir {
            chosen: set.is_some(),
            directory: set.map_or_else(|| "/var/tmp".into(), PathBuf::from),
        }
    }

    pub fn at(directory: impl Into<PathBuf>) -> ScratchDir {
        ScratchDir {
            directory: directory.into(),
            chosen: false,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.directory
    }

    /// Creates an empty file.
    pub(super) fn file(&self) -> Result<File, VolumeFault> {
        self.nameless().map(File::from).map_err(self.fault())
    }

    /// Creates a sparse file of zeros.
    pub(super) fn sparse(&self, bytes: u64) -> Result<OwnedFd, VolumeFault> {
        let file = self.file()?;
        file.set_len(bytes).map_err(self.fault())?;
        Ok(file.into())
    }

    fn fault(&self) -> impl FnOnce(io::Error) -> VolumeFault {
        let (directory, chosen) = (self.directory.clone(), self.chosen);
        move |cause| VolumeFault::Scratch {
            directory,
            chosen,
            cause,
        }
    }

    fn nameless(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
        match open(&self.directory, flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => self.unlinked(),
            other => Ok(other?),
        }
    }

    /// For file systems without O_TMPFILE.
    fn unlinked(&self) -> io::Result<OwnedFd> {
        let path = self.directory.join(format!(".husk-{}", uuid::Uuid::new_v4()));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let fd = open(&path, flags, Mode::RUSR | Mode::WUSR)?;
        std::fs::remove_file(&path)?;
        Ok(fd)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn files_leave_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = ScratchDir::at(dir.path());
        let sparse = File::from(scratch.sparse(64 << 20).unwrap()).metadata().unwrap();
        assert_eq!((sparse.len(), sparse.blocks()), (64 << 20, 0));
        let empty = scratch.file().unwrap().metadata().unwrap();
        let unlinked = File::from(scratch.unlinked().unwrap()).metadata().unwrap();
        assert_eq!((empty.len(), empty.nlink(), unlinked.nlink()), (0, 0, 0));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
