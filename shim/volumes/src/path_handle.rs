//! Checks the type of a file before opening it: opening a FIFO blocks, and opening a device may start it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat, openat2};

use super::image_handle::reopen;
use super::launcher_user::or_as_launcher;

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
        let fd = or_as_launcher(|| Ok(openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?))?;
        PathHandle::new(fd, path.to_owned())
    }

    /// Looks up an untrusted path below a trusted directory. It must not contain symbolic links or lead out of the
    /// directory.
    pub(super) fn beneath(directory: &Path, path: &Path) -> io::Result<PathHandle> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = or_as_launcher(|| Ok(open(directory, flags, Mode::empty())?))?;
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
        let fd = or_as_launcher(|| Ok(openat2(root, path, flags, Mode::empty(), how)?))?;
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
