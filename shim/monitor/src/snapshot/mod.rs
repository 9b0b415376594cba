//! Snapshots of VMs: a directory each, with the machine's state, its memory and the disks that are included.
//!
//! ```text
//! DIR/snapshot.json      the description (`Snapshot`), written last: without it the snapshot is incomplete
//!     state.json memory  written by the VMM
//!     disk-VOLUME.img    an included image; .qcow2 is an overlay
//!     base-VOLUME.img    the backing image of an overlay, if no path leads to it
//!     checksums          of the files but snapshot.json, if they were asked for
//! ```
//!
//! The files are never written again, and VMs that go on from the snapshot keep them open. Only snapshot.json is
//! replaced: it says that the VM has resumed, or that a snapshot which can be restored once was restored.

mod check;
mod checksums;
mod chunk_digests;
mod copied_disk;
mod directory;
mod disks;
mod error;
mod format;
mod interfaces;
mod lock;
mod open_disk_refs;
mod restore;

pub(crate) use checksums::Checksums;
pub use checksums::verify;
pub(crate) use copied_disk::adapt as adapt_copied_disk;
pub(crate) use directory::{NewSnapshot, SnapshotDir};
pub(crate) use disks::{DiskCopies, DiskSet, UnsavedVolume};
pub use error::SnapshotError;
pub use format::Snapshot;
pub(crate) use format::{CHECKSUMS, MEMORY, STATE, SavedDisk, VERSION, now};
pub(crate) use interfaces::PluggedInterface;
pub(crate) use open_disk_refs::OpenDiskRefs;
pub(crate) use restore::{ConsumedSnapshot, OpenSnapshot};

use std::path::Path;

/// Reads the description of a complete snapshot.
///
/// # Errors
/// The directory is not a snapshot, an incomplete one, or of another version of the format.
pub fn read(directory: &Path) -> Result<Snapshot, SnapshotError> {
    SnapshotDir::open(directory)?.read()
}

#[cfg(test)]
mod tests;
