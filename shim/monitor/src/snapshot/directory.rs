//! The directory of a snapshot.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, Dir, FlockOperation, Mode, OFlags, ResolveFlags, fsync, openat, openat2, renameat, unlinkat,
};
use tracing::warn;

use super::error::SnapshotError;
use super::format::{LIMIT, MEMORY, SNAPSHOT, STATE, Snapshot, now};
use super::lock::{LockAnswer, try_lock, warn_not_locked};

/// The next description, until it takes the place of the present one.
const NEXT: &str = "snapshot.json.new";
/// Maximum time for another process to change the description, which takes milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(10);

/// An open snapshot directory. It is found again if it is moved.
#[derive(Debug)]
pub(crate) struct SnapshotDir {
    fd: OwnedFd,
    /// For errors.
    path: PathBuf,
}

impl SnapshotDir {
    pub(crate) fn open(path: &Path) -> Result<SnapshotDir, SnapshotError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = openat(CWD, path, flags, Mode::empty()).map_err(SnapshotError::io(path))?;
        Ok(SnapshotDir {
            fd,
            path: path.to_owned(),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Path of a file, for errors.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens a regular file of the directory for reading.
    pub(super) fn file(&self, name: &str) -> Result<File, SnapshotError> {
        self.regular(name).map_err(SnapshotError::io(self.path_of(name)))
    }

    fn regular(&self, name: &str) -> io::Result<File> {
        // Opening a FIFO would block.
        let file = File::from(self.at(name, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty())?);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::other("it is not a regular file")),
        }
    }

    fn at(&self, name: &str, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        Ok(openat2(&self.fd, name, flags | OFlags::CLOEXEC, mode, resolve)?)
    }

    /// Reads the description.
    pub(crate) fn read(&self) -> Result<Snapshot, SnapshotError> {
        match self.regular(SNAPSHOT) {
            Ok(file) => self.parse(&file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(self.missing()),
            Err(error) => Err(SnapshotError::io(self.path_of(SNAPSHOT))(error)),
        }
    }

    fn parse(&self, file: &File) -> Result<Snapshot, SnapshotError> {
        let mut text = Vec::new();
        file.take(LIMIT as u64 + 1)
            .read_to_end(&mut text)
            .map_err(SnapshotError::io(self.path_of(SNAPSHOT)))?;
        if text.len() > LIMIT {
            let reason = format!("it is larger than {} MiB", LIMIT >> 20);
            return Err(SnapshotError::invalid(&self.path, reason));
        }
        Snapshot::parse(&text, &self.path)
    }

    /// The error of a directory without a description.
    fn missing(&self) -> SnapshotError {
        let begun = [STATE, MEMORY].iter().any(|name| self.regular(name).is_ok());
        match begun {
            true => SnapshotError::Incomplete(self.path.clone()),
            false => SnapshotError::NotASnapshot(self.path.clone()),
        }
    }

    /// Marks the snapshot as unusable because its VM resumes. If the mark cannot be written, removes the description.
    /// Does nothing if the snapshot was removed.
    pub(crate) fn mark_resumed(&self) -> Result<(), SnapshotError> {
        let _lock = self.lock()?;
        let file = match self.regular(SNAPSHOT) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => file.map_err(SnapshotError::io(self.path_of(SNAPSHOT)))?,
        };
        let mut snapshot = self.parse(&file)?;
        if snapshot.resumed {
            return Ok(());
        }
        snapshot.check_restorable(&self.path)?;
        snapshot.resumed = true;
        let Err(error) = self.write(&snapshot) else {
            return Ok(());
        };
        // A snapshot without it is refused, and a removal needs no free space.
        if unlinkat(&self.fd, SNAPSHOT, AtFlags::empty()).is_err() || fsync(&self.fd).is_err() {
            return Err(error);
        }
        let directory = self.path.display();
        warn!(%directory, %error, "the snapshot has no snapshot.json any more, because it could not be marked");
        Ok(())
    }

    /// Records that the snapshot is restored. Fails if it cannot be, since it was or its VM has resumed.
    pub(super) fn mark_consumed(&self) -> Result<(), SnapshotError> {
        let _lock = self.lock()?;
        let mut snapshot = self.read()?;
        snapshot.check_restorable(&self.path)?;
        snapshot.consumed = Some(now());
        self.write(&snapshot)
    }

    /// Takes [`SnapshotDir::mark_consumed`] back.
    pub(super) fn mark_unconsumed(&self) -> Result<(), SnapshotError> {
        let _lock = self.lock()?;
        let mut snapshot = self.read()?;
        snapshot.consumed = None;
        self.write(&snapshot)
    }

    /// The text of a description.
    fn text(&self, snapshot: &Snapshot) -> Result<Vec<u8>, SnapshotError> {
        let text = serde_json::to_vec_pretty(snapshot).map_err(io::Error::from);
        let text = text.map_err(SnapshotError::io(self.path_of(SNAPSHOT)))?;
        if text.len() > LIMIT {
            let reason = format!(
                "it would be larger than {} MiB: the manifest is too large",
                LIMIT >> 20
            );
            return Err(SnapshotError::invalid(&self.path, reason));
        }
        Ok(text)
    }

    /// Writes the description in place of the present one.
    fn write(&self, snapshot: &Snapshot) -> Result<(), SnapshotError> {
        let text = self.text(snapshot)?;
        let written = || -> io::Result<()> {
            // An existing file may belong to another user or be a hard link.
            let _ = unlinkat(&self.fd, NEXT, AtFlags::empty());
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
            let mut file = File::from(self.at(NEXT, flags, Mode::RUSR | Mode::WUSR)?);
            file.write_all(&text)?;
            file.sync_all()?;
            renameat(&self.fd, NEXT, &self.fd, SNAPSHOT)?;
            Ok(fsync(&self.fd)?)
        };
        written().map_err(|error| {
            // It takes space that a full disk needs.
            let _ = unlinkat(&self.fd, NEXT, AtFlags::empty());
            SnapshotError::io(self.path_of(SNAPSHOT))(error)
        })
    }

    /// Takes a directory that exists, if it is empty.
    fn take_over(&self) -> io::Result<Found> {
        self.take_over_with(|| {})
    }

    /// The same. `meanwhile` is called before the directory is private.
    pub(super) fn take_over_with(&self, meanwhile: impl FnOnce()) -> io::Result<Found> {
        // The mode of a directory with files stays.
        if !self.is_empty()? {
            return Ok(Found::Files);
        }
        let directory = File::from(self.fd.try_clone()?);
        let metadata = directory.metadata()?;
        if metadata.uid() != rustix::process::geteuid().as_raw() {
            return Ok(Found::Foreign);
        }
        meanwhile();
        directory.set_permissions(fs::Permissions::from_mode(0o700))?;
        // From here on nobody else makes files in it.
        if !self.is_empty()? {
            directory.set_permissions(metadata.permissions())?;
            return Ok(Found::Files);
        }
        Ok(Found::Empty)
    }

    fn is_empty(&self) -> io::Result<bool> {
        for entry in Dir::read_from(&self.fd)? {
            if ![c".", c".."].contains(&entry?.file_name()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Locks the directory until the result is dropped.
    fn lock(&self) -> Result<OwnedFd, SnapshotError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // A lock is of the open file.
        let fd = openat(&self.fd, ".", flags, Mode::empty()).map_err(SnapshotError::io(&self.path))?;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            match try_lock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(LockAnswer::Locked) => return Ok(fd),
                Ok(LockAnswer::Held) if Instant::now() < deadline => std::thread::sleep(AGAIN),
                Ok(LockAnswer::Held) => return Err(SnapshotError::InUse(self.path.clone())),
                Ok(LockAnswer::Unsupported(error)) => {
                    warn_not_locked(&self.path, error);
                    return Ok(fd);
                }
                Err(error) => return Err(SnapshotError::io(&self.path)(error)),
            }
        }
    }
}

/// A directory that exists.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Empty,
    Files,
    /// It is another user's.
    Foreign,
}

/// A snapshot that is being made. Dropped before [`NewSnapshot::keep`], it is removed.
#[derive(Debug)]
pub(crate) struct NewSnapshot {
    dir: Arc<SnapshotDir>,
    /// It did not exist.
    made: bool,
    files: Vec<String>,
    kept: AtomicBool,
    _lock: OwnedFd,
}

impl NewSnapshot {
    /// Creates the directory, which may exist if it is empty.
    pub(crate) fn create(path: &Path) -> Result<NewSnapshot, SnapshotError> {
        let made = match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(SnapshotError::io(path)(error)),
        };
        let dir = SnapshotDir::open(path)?;
        let lock = dir.lock()?;
        if !made {
            match dir.take_over().map_err(SnapshotError::io(path))? {
                Found::Empty => {}
                Found::Files => return Err(SnapshotError::NotEmpty(path.to_owned())),
                Found::Foreign => return Err(SnapshotError::ForeignDirectory(path.to_owned())),
            }
        }
        Ok(NewSnapshot {
            dir: Arc::new(dir),
            made,
            files: Vec::new(),
            kept: AtomicBool::new(false),
            _lock: lock,
        })
    }

    /// The directory.
    pub(crate) fn dir(&self) -> Arc<SnapshotDir> {
        self.dir.clone()
    }

    /// Creates an empty file in it.
    pub(crate) fn file(&mut self, name: &str) -> Result<File, SnapshotError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let file = self.dir.at(name, flags, Mode::RUSR | Mode::WUSR);
        let file = file.map_err(SnapshotError::io(self.dir.path_of(name)))?;
        self.files.push(name.to_owned());
        Ok(file.into())
    }

    /// Removes a file that was created.
    pub(super) fn remove(&mut self, name: &str) {
        self.files.retain(|file| file != name);
        let _ = unlinkat(&self.dir.fd, name, AtFlags::empty());
    }

    /// Refuses a description that is too large.
    pub(crate) fn check_size(&self, snapshot: &Snapshot) -> Result<(), SnapshotError> {
        self.dir.text(snapshot).map(drop)
    }

    /// Writes the description. The files are synced already. The snapshot is complete then, but still removed unless it
    /// is kept. Blocks.
    pub(crate) fn complete(&self, snapshot: &Snapshot) -> Result<(), SnapshotError> {
        self.dir.write(snapshot)?;
        if self.made
            && let Some(parent) = self.dir.path.parent()
        {
            let parent = File::open(parent).and_then(|parent| parent.sync_all());
            parent.map_err(SnapshotError::io(&self.dir.path))?;
        }
        Ok(())
    }

    /// Keeps the complete snapshot. It cannot fail, because who lets the VM go on must know a snapshot that stays.
    pub(crate) fn keep(&self) -> Arc<SnapshotDir> {
        self.kept.store(true, Ordering::Relaxed);
        self.dir()
    }
}

impl Drop for NewSnapshot {
    fn drop(&mut self) {
        if *self.kept.get_mut() {
            return;
        }
        // The description first: without it nobody restores the rest.
        let all = [SNAPSHOT, NEXT].into_iter();
        for name in all.chain(self.files.iter().map(String::as_str)) {
            // A file that stays is that of an incomplete snapshot, which is refused.
            let _ = unlinkat(&self.dir.fd, name, AtFlags::empty());
        }
        if self.made {
            let _ = fs::remove_dir(&self.dir.path);
        }
    }
}
