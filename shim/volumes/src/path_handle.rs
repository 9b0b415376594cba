//! Checks the type of a file before opening it: opening a FIFO blocks, and opening a device may start it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use husk_launcher_user::retry_as_launcher;
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat, openat2};

use super::image_handle::reopen;

/// An O_PATH handle: a file that was looked up but not opened.
#[derive(Debug)]
pub(super) struct PathHandle {
    fd: OwnedFd,
    /// Path of the lookup, for errors.
    pub(super) path: PathBuf,
    pub(super) kind: FileType,
    /// It has a name; one that was passed as a descriptor may have none.
    has_name: bool,
}

impl PathHandle {
    /// Looks up a path with the caller's rights. Symbolic links are followed.
    pub(super) fn on_host(path: &Path) -> io::Result<PathHandle> {
        let fd = retry_as_launcher(|| Ok(openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?))?;
        PathHandle::new(fd, path.to_owned())
    }

    /// Looks up an untrusted path below a trusted directory. It must not contain symbolic links or lead out of the
    /// directory.
    pub(super) fn beneath(directory: &Path, path: &Path) -> io::Result<PathHandle> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = retry_as_launcher(|| Ok(open(directory, flags, Mode::empty())?))?;
        PathHandle::below(&root, directory, path)
    }

    /// As [`PathHandle::beneath`], from this directory.
    pub(super) fn child(&self, path: &Path) -> io::Result<PathHandle> {
        PathHandle::below(&self.fd, &self.path, path)
    }

    /// As [`PathHandle::child`], but follows symbolic links that stay in the directory, as the kubelet's do.
    pub(super) fn within(&self, path: &Path) -> io::Result<PathHandle> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        PathHandle::look_up(&self.fd, &self.path, path, resolve)
    }

    fn below(root: &OwnedFd, directory: &Path, path: &Path) -> io::Result<PathHandle> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        PathHandle::look_up(root, directory, path, resolve)
    }

    fn look_up(root: &OwnedFd, directory: &Path, path: &Path, how: ResolveFlags) -> io::Result<PathHandle> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let fd = retry_as_launcher(|| Ok(openat2(root, path, flags, Mode::empty(), how)?))?;
        PathHandle::new(fd, directory.join(path))
    }

    fn new(fd: OwnedFd, path: PathBuf) -> io::Result<PathHandle> {
        let state = fstat(&fd)?;
        Ok(PathHandle {
            fd,
            path,
            kind: FileType::from_raw_mode(state.st_mode),
            has_name: state.st_nlink > 0,
        })
    }

    /// True if the file was removed since it was looked up.
    pub(super) fn was_removed(&self) -> io::Result<bool> {
        Ok(self.has_name && fstat(&self.fd)?.st_nlink == 0)
    }

    /// The O_PATH descriptor: for fstat, and to create files in a directory.
    pub(super) fn handle(&self) -> &OwnedFd {
        &self.fd
    }

    pub(super) fn is_directory(&self) -> bool {
        self.kind == FileType::Directory
    }

    /// Replaces the path for errors.
    pub(super) fn with_name(self, name: impl Into<PathBuf>) -> PathHandle {
        PathHandle {
            path: name.into(),
            ..self
        }
    }

    pub(super) fn try_clone(&self) -> io::Result<PathHandle> {
        PathHandle::new(self.fd.try_clone()?, self.path.clone())
    }

    /// Opens exactly this file, whatever its path refers to by now.
    pub(super) fn open(&self, flags: OFlags) -> io::Result<OwnedFd> {
        reopen(&self.fd, flags | OFlags::NONBLOCK | OFlags::NOCTTY)
    }

    /// Names in a directory, without `.` and `..`.
    pub(super) fn names(&self) -> io::Result<Vec<PathBuf>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(self.open(OFlags::RDONLY | OFlags::DIRECTORY)?)? {
            let name = entry?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(PathBuf::from(
                    <std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(name),
                ));
            }
        }
        Ok(names)
    }
}

/// A file type in words.
pub(super) fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        FileType::Unknown => "a file of unknown type",
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use husk_launcher_user::{owner, without};
    use rustix::fs::chown;
    use rustix::thread::CapabilitySet;

    use super::*;

    #[test]
    #[ignore = "needs root"]
    fn an_image_that_only_the_launcher_may_open_is_opened() {
        let home = tempfile::tempdir().unwrap();
        fs::set_permissions(home.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let claim = home.path().join("claim");
        let image = claim.join("disk.img");
        fs::create_dir(&claim).unwrap();
        fs::write(&image, "data").unwrap();
        let (user, group) = owner();
        for (path, mode) in [(&image, 0o600), (&claim, 0o700)] {
            fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
            chown(path, Some(user), Some(group)).unwrap();
        }
        // The rights to ignore permissions, which an NFS server with root_squash does not give.
        let ignoring = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
        without(ignoring, || {
            let denied = File::open(&image).unwrap_err();
            assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);

            let directory = PathHandle::on_host(&claim).unwrap();
            assert_eq!(directory.names().unwrap(), [Path::new("disk.img")]);
            let found = directory.child("disk.img".as_ref()).unwrap();
            let opened = found.open(OFlags::RDWR).unwrap();
            reopen(&opened, OFlags::WRONLY).unwrap();
            PathHandle::on_host(&image).unwrap();

            // This thread stays root.
            let made = File::create(home.path().join("made")).unwrap();
            assert_eq!(made.metadata().unwrap().uid(), 0);
            File::open(&image).unwrap_err();
        });
    }
}
