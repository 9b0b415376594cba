//! A snapshot that a VM goes on from.

use std::fs::File;
use std::path::Path;

use husk_vmi::VmPlan;
use husk_volumes::{SavedBase, SavedImage, SavedVolume};
use rustix::fs::FlockOperation;

use super::directory::SnapshotDir;
use super::error::SnapshotError;
use super::format::{BaseContent, DiskContent, MEMORY, STATE, Snapshot, SnapshotImage};
use super::interfaces::PluggedInterface;
use super::lock::{LockAnswer, lock_exclusively, try_lock, writable};

/// An open snapshot.
#[derive(Debug)]
pub(crate) struct OpenSnapshot {
    pub(crate) dir: SnapshotDir,
    pub(crate) snapshot: Snapshot,
    pub(crate) state: File,
    /// Locked until its last descriptor is closed, which is the VMM's. Writable only where the file system needs that
    /// for an exclusive lock (NFS).
    pub(crate) memory: File,
}

impl OpenSnapshot {
    /// Opens a snapshot, and checks whether it can be restored. Blocks.
    pub(crate) fn open(directory: &Path) -> Result<OpenSnapshot, SnapshotError> {
        let dir = SnapshotDir::open(directory)?;
        let snapshot = dir.read()?;
        snapshot.check_restorable(directory)?;
        let state = sized(&dir, STATE, snapshot.state_bytes)?;
        let memory = sized(&dir, MEMORY, snapshot.memory_bytes)?;
        let path = dir.path_of(MEMORY);
        let memory = match snapshot.unsaved_volumes().is_empty() {
            // Where this is not possible, nobody has the exclusive lock either.
            true => match try_lock(&memory, FlockOperation::NonBlockingLockShared) {
                Ok(LockAnswer::Held) => Ok(None),
                Ok(LockAnswer::Locked | LockAnswer::Unsupported(_)) => Ok(Some(memory)),
                Err(error) => Err(error),
            },
            false => lock_exclusively(memory, &path, writable, |memory| {
                try_lock(memory, FlockOperation::NonBlockingLockExclusive)
            }),
        };
        let memory = memory.map_err(SnapshotError::io(path))?;
        let memory = memory.ok_or_else(|| SnapshotError::InUse(directory.to_owned()))?;
        Ok(OpenSnapshot {
            dir,
            snapshot,
            state,
            memory,
        })
    }

    /// The disks, in the order of the plan. Blocks.
    pub(crate) fn volumes(&self) -> Result<Vec<SavedVolume>, SnapshotError> {
        let disks = self.snapshot.disks.iter().map(|disk| {
            Ok(match &disk.content {
                DiskContent::Remade => SavedVolume::Remade,
                DiskContent::Outside(identity) => SavedVolume::Outside(*identity),
                DiskContent::Held {
                    image,
                    base,
                    block_sizes,
                } => {
                    let base = base.as_ref().map(|base| match base {
                        BaseContent::Held(base) => self.image(base).map(SavedBase::Held),
                        BaseContent::Outside(identity) => Ok(SavedBase::Outside(*identity)),
                    });
                    SavedVolume::Held {
                        image: self.image(image)?,
                        base: base.transpose()?,
                        block_sizes: *block_sizes,
                    }
                }
            })
        });
        disks.collect()
    }

    fn image(&self, image: &SnapshotImage) -> Result<SavedImage, SnapshotError> {
        Ok(SavedImage {
            file: self.dir.file(&image.file)?,
            path: self.dir.path_of(&image.file),
            format: image.format,
        })
    }

    /// The interfaces that were plugged while the VM ran.
    pub(crate) fn interfaces(&self) -> Vec<PluggedInterface> {
        self.snapshot.interfaces.clone()
    }

    /// The MAC address of an interface.
    pub(crate) fn mac(&self, name: &str) -> Option<[u8; 6]> {
        let planned = self.snapshot.plan.nics.iter().find(|nic| nic.name == name);
        let mut plugged = self.snapshot.interfaces.iter();
        let plugged = || Some(plugged.find(|interface| interface.name == name)?.mac.0);
        planned.and_then(|nic| nic.mac).or_else(plugged)
    }

    /// Refuses a plan with other disks than those of the snapshot, which was replaced then.
    pub(crate) fn check_plan(&self, plan: &VmPlan) -> Result<(), SnapshotError> {
        match self.snapshot.plan.disks == plan.disks {
            true => Ok(()),
            false => Err(SnapshotError::InUse(self.dir.path().to_owned())),
        }
    }

    /// Marks a once-only snapshot as restored; the result can undo that. Fails if it was restored, or its VM resumed,
    /// meanwhile. Blocks.
    pub(crate) fn consume(self) -> Result<Option<ConsumedSnapshot>, SnapshotError> {
        if self.snapshot.unsaved_volumes().is_empty() {
            return Ok(None);
        }
        self.dir.mark_consumed()?;
        Ok(Some(ConsumedSnapshot(self.dir)))
    }
}

/// A once-only snapshot that is marked as restored.
#[derive(Debug)]
pub(crate) struct ConsumedSnapshot(SnapshotDir);

impl ConsumedSnapshot {
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Lets it be restored again, because its guest did not run. Blocks.
    pub(crate) fn unmark(self) -> Result<(), SnapshotError> {
        self.0.mark_unconsumed()
    }
}

/// Opens a file that must have this size.
pub(super) fn sized(dir: &SnapshotDir, name: &str, expected: u64) -> Result<File, SnapshotError> {
    let file = dir.file(name)?;
    let path = dir.path_of(name);
    let bytes = file.metadata().map_err(SnapshotError::io(&path))?.len();
    match bytes == expected {
        true => Ok(file),
        false => Err(SnapshotError::WrongSize {
            path,
            bytes,
            expected,
        }),
    }
}
