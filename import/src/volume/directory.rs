//! The directory of an import.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::fstatvfs;

use super::error::VolumeError;

/// Bytes left free on the file system.
const RESERVE: u64 = 64 << 20;

/// A directory that one import uses alone.
#[derive(Debug)]
pub struct ImportDirectory {
    path: PathBuf,
    opened: File,
}

/// The files of an import's directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// The volume's disk, complete and on stable storage.
    Disk,
    /// The disk that is being written.
    NewDisk,
    /// A qcow2 image that was compressed as a whole, without that compression.
    Unpacked,
    /// The file of a web server, perhaps a part of it.
    Download,
    /// The validators of that file.
    Validators,
    /// The store with the layers of a containerDisk, and with its disk.
    Store,
}

impl Entry {
    /// The files that a conversion writes.
    pub const OF_CONVERSION: [Entry; 3] = [Entry::Disk, Entry::NewDisk, Entry::Unpacked];
    /// The files that a download writes.
    pub const OF_SOURCE: [Entry; 3] = [Entry::Validators, Entry::Download, Entry::Store];

    fn name(self) -> &'static str {
        match self {
            Entry::Disk => "disk.img",
            Entry::NewDisk => "disk.img.new",
            Entry::Unpacked => "unpacked.qcow2",
            Entry::Download => "download",
            Entry::Validators => "download.json",
            Entry::Store => "images",
        }
    }
}

impl ImportDirectory {
    /// Opens the directory, and removes what an earlier import had converted.
    ///
    /// # Errors
    /// It does not exist, or cannot be written.
    pub fn open(path: &Path) -> Result<ImportDirectory, VolumeError> {
        let opened = File::open(path).map_err(VolumeError::io(path))?;
        let directory = ImportDirectory {
            path: path.to_owned(),
            opened,
        };
        directory.remove(&Entry::OF_CONVERSION)?;
        Ok(directory)
    }

    /// Path of an entry.
    pub fn path(&self, entry: Entry) -> PathBuf {
        self.path.join(entry.name())
    }

    /// Bytes that an import may still write: the free space less a reserve.
    ///
    /// # Errors
    /// The file system does not say.
    pub fn room(&self) -> Result<u64, VolumeError> {
        let space = fstatvfs(&self.opened)
            .map_err(io::Error::from)
            .map_err(VolumeError::io(&self.path))?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        Ok(free.saturating_sub(RESERVE))
    }

    /// Fails unless there is room for `needed` bytes.
    ///
    /// # Errors
    /// There is not.
    pub fn require_room(&self, needed: u64) -> Result<(), VolumeError> {
        let free = self.room()?;
        if needed > free {
            let path = self.path.clone();
            return Err(VolumeError::NoSpace { path, needed, free });
        }
        Ok(())
    }

    /// Opens a file for reading and writing, and makes it if it is not there.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn file(&self, entry: Entry) -> Result<File, VolumeError> {
        let path = self.path(entry);
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .map_err(self.full_or_io(&path))
    }

    /// Gives an entry another name.
    ///
    /// # Errors
    /// It is not there, or the directory cannot be written.
    pub fn rename(&self, from: Entry, to: Entry) -> Result<(), VolumeError> {
        let path = self.path(from);
        fs::rename(&path, self.path(to)).map_err(VolumeError::io(&path))
    }

    /// Removes entries that are there.
    ///
    /// # Errors
    /// One cannot be removed.
    pub fn remove(&self, entries: &[Entry]) -> Result<(), VolumeError> {
        for entry in entries {
            let path = self.path(*entry);
            let removed = match entry {
                Entry::Store => fs::remove_dir_all(&path),
                _ => fs::remove_file(&path),
            };
            match removed {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(VolumeError::io(&path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Puts the new disk into its place, durably, and removes all else.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn finish(&self) -> Result<(), VolumeError> {
        let path = self.path(Entry::NewDisk);
        let synced = self.file(Entry::NewDisk)?.sync_all();
        synced.map_err(self.full_or_io(&path))?;
        self.rename(Entry::NewDisk, Entry::Disk)?;
        self.sync()?;
        self.remove(&[Entry::Unpacked])?;
        self.remove(&Entry::OF_SOURCE)?;
        self.sync()
    }

    fn sync(&self) -> Result<(), VolumeError> {
        self.opened.sync_all().map_err(VolumeError::io(&self.path))
    }

    /// The error of a write.
    pub fn full_or_io(&self, path: &Path) -> impl FnOnce(io::Error) -> VolumeError {
        let (directory, path) = (self.path.clone(), path.to_owned());
        move |error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                VolumeError::Full { path: directory }
            }
            _ => VolumeError::io(&path)(error),
        }
    }

    /// The error of a conversion that had no room.
    pub fn full(&self) -> VolumeError {
        VolumeError::Full {
            path: self.path.clone(),
        }
    }
}
