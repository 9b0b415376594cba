//! Scratch files that end with their VM.
//!
//! They have no name, so they vanish with the VMM however it ends. They are on disk, because the runtime directory is
//! usually a tmpfs.
//!
//! In a pod they have names, because kubelet and containerd count what they find in directories against the limit of
//! `ephemeral-storage`. Both delete the directories with the pod.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use tracing::warn;

use super::error::VolumeFault;

/// Scratch directory for ephemeral data.
#[derive(Debug, Clone)]
pub struct ScratchDir {
    directory: PathBuf,
    /// Set by `HUSK_SCRATCH_DIR`.
    chosen: bool,
    /// Files have names.
    counted: bool,
}

/// Begin of the names in a pod's directory.
const PREFIX: &str = ".husk-scratch-";

impl ScratchDir {
    /// `HUSK_SCRATCH_DIR`, else `/var/tmp`.
    #[must_use]
    pub fn locate() -> ScratchDir {
        let set = std::env::var_os("HUSK_SCRATCH_DIR").filter(|value| !value.is_empty());
        ScratchDir {
            chosen: set.is_some(),
            directory: set.map_or_else(|| "/var/tmp".into(), PathBuf::from),
            counted: false,
        }
    }

    pub fn at(directory: impl Into<PathBuf>) -> ScratchDir {
        ScratchDir {
            directory: directory.into(),
            chosen: false,
            counted: false,
        }
    }

    /// A directory of a pod's ephemeral storage.
    pub fn of_pod(directory: impl Into<PathBuf>) -> ScratchDir {
        ScratchDir {
            counted: true,
            ..ScratchDir::at(directory)
        }
    }

    /// Removes the files of the VM's earlier start in a pod.
    pub(super) fn clear(&self) {
        if !self.counted {
            return;
        }
        for entry in std::fs::read_dir(&self.directory).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.as_encoded_bytes().starts_with(PREFIX.as_bytes())
                && let Err(error) = std::fs::remove_file(entry.path())
            {
                warn!(path = %entry.path().display(), %error, "cannot remove a file of the VM's earlier start");
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.directory
    }

    /// Creates an empty file of the VM.
    pub(super) fn file(&self) -> Result<File, VolumeFault> {
        let made = match self.counted {
            true => self.named(PREFIX).map(|(_, fd)| fd),
            false => self.nameless(),
        };
        made.map(File::from).map_err(self.fault())
    }

    /// Creates an empty file that may be dropped before the VM starts: it never has a name.
    pub(super) fn temporary(&self) -> Result<File, VolumeFault> {
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
        let (path, fd) = self.named(".husk-")?;
        std::fs::remove_file(&path)?;
        Ok(fd)
    }

    fn named(&self, prefix: &str) -> io::Result<(PathBuf, OwnedFd)> {
        let path = self.directory.join(format!("{prefix}{}", uuid::Uuid::new_v4()));
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let fd = open(&path, flags, Mode::RUSR | Mode::WUSR)?;
        Ok((path, fd))
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

    #[test]
    fn files_of_a_pod_have_names_until_its_next_start() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("other"), "").unwrap();
        let count = || std::fs::read_dir(dir.path()).unwrap().count();
        let scratch = ScratchDir::of_pod(dir.path());
        let disk = File::from(scratch.sparse(4096).unwrap()).metadata().unwrap();
        let overlay = scratch.file().unwrap().metadata().unwrap();
        let temporary = scratch.temporary().unwrap().metadata().unwrap();
        assert_eq!((disk.nlink(), overlay.nlink(), temporary.nlink()), (1, 1, 0));
        assert_eq!((disk.mode() & 0o777, count()), (0o600, 3));
        ScratchDir::at(dir.path()).clear();
        assert_eq!(count(), 3);
        scratch.clear();
        assert_eq!(count(), 1);
        assert!(dir.path().join("other").exists());
    }
}
