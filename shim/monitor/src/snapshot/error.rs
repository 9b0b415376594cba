//! Errors of snapshots.

use std::io;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

/// An error of making or reading a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// A system call on a path failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The directory to be made has files.
    #[error("{} is not empty: name a directory that does not exist", .0.display())]
    NotEmpty(PathBuf),
    /// The directory to be made is another user's.
    #[error("{} belongs to another user than the VM: name a directory that does not exist", .0.display())]
    ForeignDirectory(PathBuf),
    /// The directory holds nothing of a snapshot.
    #[error("{} is not a snapshot: it has no snapshot.json", .0.display())]
    NotASnapshot(PathBuf),
    /// Its making was interrupted.
    #[error("{} is not a complete snapshot: it was interrupted; remove it", .0.display())]
    Incomplete(PathBuf),
    /// snapshot.json has another version.
    #[error(
        "{}/snapshot.json: version {version} is unknown, this Husk reads version {}: use the Husk that made it",
        directory.display(),
        super::VERSION
    )]
    Version {
        /// The directory.
        directory: PathBuf,
        /// The version found.
        version: u64,
    },
    /// snapshot.json is not valid.
    #[error("{}/snapshot.json: {reason}", directory.display())]
    Invalid {
        /// The directory.
        directory: PathBuf,
        /// The reason, which names the field.
        reason: String,
    },
    /// A file has another size than when it was written.
    #[error("{} has {bytes} bytes, not {expected}: the snapshot is damaged", path.display())]
    WrongSize {
        /// The file.
        path: PathBuf,
        /// The size found.
        bytes: u64,
        /// The size in snapshot.json.
        expected: u64,
    },
    /// It was made without checksums.
    #[error("{} has no checksums: make it with `husk snapshot --checksums`, or leave out --verify", .0.display())]
    NoChecksums(PathBuf),
    /// The file with the checksums is another than snapshot.json says.
    #[error("{} is damaged, or snapshot.json is: nothing can be compared with it", .0.display())]
    WrongChecksums(PathBuf),
    /// A file has another content than when it was written.
    #[error("{}: the MiB at byte {offset} is not what was written: the snapshot is damaged", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Offset of the first wrong MiB, in bytes.
        offset: u64,
    },
    /// The VM that it was made of has resumed.
    #[error(
        "{}: the VM was resumed after this snapshot and may have written to volume {volume:?}, which is not in it: make \
         another snapshot",
        directory.display()
    )]
    Resumed {
        /// The directory.
        directory: PathBuf,
        /// A volume that is not included.
        volume: String,
    },
    /// It was restored, and can be once.
    #[error(
        "{} was restored already at {}: volume {volume:?}, which is not in it, belongs to that VM",
        directory.display(),
        utc(*time)
    )]
    Consumed {
        /// The directory.
        directory: PathBuf,
        /// Seconds since 1970.
        time: u64,
        /// A volume that is not included.
        volume: String,
    },
    /// Another process changes or uses it.
    #[error("{} is in use by another VM or command: try again", .0.display())]
    InUse(PathBuf),
    /// A volume cannot be saved.
    #[error("volume {volume:?}: {reason}")]
    Volume {
        /// Its name.
        volume: String,
        /// The reason and the remedy.
        reason: String,
    },
    /// An interface cannot be saved or restored.
    #[error("interface {interface:?}: {reason}")]
    Interface {
        /// Its name.
        interface: String,
        /// The reason and the remedy.
        reason: String,
    },
}

/// A time in seconds since 1970, for people.
fn utc(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok();
    let time = time.and_then(|seconds| Timestamp::from_second(seconds).ok());
    time.map_or_else(|| format!("second {seconds}"), |time| time.to_string())
}

impl SnapshotError {
    /// Adds the path that a system call failed on.
    pub(super) fn io<E: Into<io::Error>>(path: impl Into<PathBuf>) -> impl FnOnce(E) -> SnapshotError {
        let path = path.into();
        move |source| SnapshotError::Io {
            path,
            source: source.into(),
        }
    }

    pub(super) fn invalid(directory: &Path, reason: impl Into<String>) -> SnapshotError {
        SnapshotError::Invalid {
            directory: directory.to_owned(),
            reason: reason.into(),
        }
    }

    pub(crate) fn volume(volume: &str, reason: impl Into<String>) -> SnapshotError {
        SnapshotError::Volume {
            volume: volume.to_owned(),
            reason: reason.into(),
        }
    }

    pub(crate) fn interface(interface: &str, reason: impl Into<String>) -> SnapshotError {
        SnapshotError::Interface {
            interface: interface.to_owned(),
            reason: reason.into(),
        }
    }
}
