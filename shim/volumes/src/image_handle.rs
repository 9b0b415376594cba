//! References to images that a VMM has open.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use husk_launcher_user::retry_as_launcher;
use rustix::fs::{FileType, Mode, OFlags, fstat, open};

use super::file_identity::FileIdentity;

/// A reference to an open image, which neither opens nor locks it (`O_PATH`). Cloned, it refers to the same image.
///
/// The VMM's descriptor cannot be used to read the image: its flags and its locks go with it.
#[derive(Debug)]
pub struct ImageHandle {
    path: OwnedFd,
}

impl ImageHandle {
    /// Creates a reference to an open image.
    pub fn of(file: impl AsFd) -> io::Result<ImageHandle> {
        let path = reopen(file, OFlags::PATH)?;
        Ok(ImageHandle { path })
    }

    /// Creates another reference to the same image.
    pub fn try_clone(&self) -> io::Result<ImageHandle> {
        let path = self.path.try_clone()?;
        Ok(ImageHandle { path })
    }

    /// Opens the image for reading.
    pub fn open(&self) -> io::Result<File> {
        reopen(&self.path, OFlags::RDONLY | OFlags::NONBLOCK).map(File::from)
    }

    /// The identity of the image.
    pub fn identity(&self) -> io::Result<FileIdentity> {
        FileIdentity::of(&self.path)
    }

    /// True if the image is a regular file that has been removed, or never had a name.
    pub fn is_nameless(&self) -> io::Result<bool> {
        let stat = fstat(&self.path)?;
        Ok(FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_nlink == 0)
    }
}

/// Opens an open file once more, with flags and locks of its own.
///
/// # Errors
/// The kernel's error.
pub fn reopen(file: impl AsFd, flags: OFlags) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    retry_as_launcher(|| Ok(open(&path, flags | OFlags::CLOEXEC, Mode::empty())?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use rustix::fs::{fcntl_getfl, fcntl_setfl};

    use super::*;
    use crate::ScratchDir;

    #[test]
    fn a_handle_reads_what_the_vmm_writes_and_has_flags_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let file = ScratchDir::at(dir.path()).file().unwrap();
        // As the cache mode of a disk does.
        fcntl_setfl(&file, fcntl_getfl(&file).unwrap() | OFlags::APPEND).unwrap();
        let handle = ImageHandle::of(&file).unwrap();
        assert!(handle.is_nameless().unwrap());
        file.write_all_at(b"late", 0).unwrap();
        drop(file);
        let read = handle.try_clone().unwrap().open().unwrap();
        assert!(!fcntl_getfl(&read).unwrap().contains(OFlags::APPEND));
        let mut content = [0; 4];
        read.read_exact_at(&mut content, 0).unwrap();
        assert_eq!(&content, b"late");
        assert_eq!(handle.identity().unwrap().bytes, 4);

        let named = tempfile::NamedTempFile::new_in(dir.path()).unwrap();
        assert!(!ImageHandle::of(&named).unwrap().is_nameless().unwrap());
    }
}
