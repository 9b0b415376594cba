//! Finding out what a path is before opening it: opening a FIFO waits, opening a device may start it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, open, openat, openat2};

/// A file that was found but not opened.
#[derive(Debug)]
pub(super) struct PathHandle {
    fd: OwnedFd,
    /// What it was found as, for errors.
    pub(super) path: PathBuf,
    pub(super) kind: FileType,
}

impl PathHandle {
    /// A path with the caller's own rights; symbolic links are followed.
    pub(super) fn on_host(path: &Path) -> io::Result<PathHandle> {
        PathHandle::new(
            openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?,
            path.to_owned(),
        )
    }

    /// A path that somebody else wrote, below a directory the caller named: it leads through no symbolic link and
    /// not out of the directory.
    pub(super) fn beneath(directory: &Path, path: &Path) -> io::Result<PathHandle> {
        let root = open(
            directory,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        PathHandle::below(&root, directory, path)
    }

    /// The same, from a directory that was found already.
    pub(super) fn child(&self, path: &Path) -> io::Result<PathHandle> {
        PathHandle::below(&self.fd, &self.path, path)
    }

    /// The same, but for links that stay in the directory: those of a directory the kubelet mounts.
    pub(super) fn within(&self, path: &Path) -> io::Result<PathHandle> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let fd = openat2(
            &self.fd,
            path,
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
            resolve,
        )?;
        PathHandle::new(fd, self.path.join(path))
    }

    fn below(root: &OwnedFd, directory: &Path, path: &Path) -> io::Result<PathHandle> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let fd = openat2(root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve)?;
        PathHandle::new(fd, directory.join(path))
    }

    fn new(fd: OwnedFd, path: PathBuf) -> io::Result<PathHandle> {
        let kind = FileType::from_raw_mode(fstat(&fd)?.st_mode);
        Ok(PathHandle { fd, path, kind })
    }

    /// The file itself, which tells about it and cannot be read.
    pub(super) fn handle(&self) -> &OwnedFd {
        &self.fd
    }

    pub(super) fn is_directory(&self) -> bool {
        self.kind == FileType::Directory
    }

    /// The same file under another name, for errors.
    pub(super) fn with_name(self, name: impl Into<PathBuf>) -> PathHandle {
        PathHandle {
            path: name.into(),
            ..self
        }
    }

    /// The same file once more.
    pub(super) fn try_clone(&self) -> io::Result<PathHandle> {
        PathHandle::new(self.fd.try_clone()?, self.path.clone())
    }

    /// Opens just this file, whatever its path leads to by now.
    pub(super) fn open(&self, flags: OFlags) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.fd.as_fd().as_raw_fd());
        Ok(open(
            path,
            flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY,
            Mode::empty(),
        )?)
    }

    /// The names in a directory, `.` and `..` left out.
    pub(super) fn names(&self) -> io::Result<Vec<PathBuf>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(self.open(OFlags::RDONLY | OFlags::DIRECTORY)?)? {
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

/// A file type as people call it.
pub(super) fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        FileType::Unknown => "of no known type",
    }
}
