//! The disks while a snapshot is made, and the references to their images that it needs.

use std::io;
use std::sync::Arc;

use tracing::warn;

use super::DisksActor;
use crate::monitor::vm_error::VmError;
use crate::snapshot::{DiskSet, KeptDisk};

/// While it exists, no device of the VM is added, removed or resized.
pub(in crate::monitor) type Hold = Arc<()>;

impl DisksActor {
    pub(super) fn is_held(&self) -> bool {
        self.held.strong_count() > 0
    }

    /// Returns the disks for a snapshot, which no request changes while the first result exists.
    pub(super) fn hold(&mut self) -> Result<(Hold, DiskSet), VmError> {
        if let Some(name) = self.waiters.keys().next() {
            let text = format!("volume {name:?} is being removed: wait until the guest has released it");
            return Err(VmError::wrong_state(text));
        }
        let hold = Arc::new(());
        self.held = Arc::downgrade(&hold);
        let set = DiskSet {
            plan: self.table.plan().clone(),
            plugged: self.table.plugged().clone(),
            kept: self.kept.clone(),
        };
        Ok((hold, set))
    }

    /// Keeps references to the images of a disk.
    pub(super) fn keep(&mut self, name: &str, kept: io::Result<KeptDisk>) {
        match kept {
            Ok(kept) => drop(self.kept.insert(name.to_owned(), Arc::new(kept))),
            Err(error) => warn!(volume = name, %error, "the volume cannot be in a snapshot"),
        }
    }
}
