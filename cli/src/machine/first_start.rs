//! The mark of a VM that is to start and has not: `.NAME.not-started` beside its object, with the run strategy.
//!
//! RerunOnFailure and Once start a VM when it is new. After that only the mark tells a VM whose guest never ran, because
//! `husk apply` was cut off or the start has failed, from one that has ended, or that its user has stopped.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use husk_objects::Key;
use husk_vmi::objects::RunStrategy;

use super::{LocalStores, vm};
use crate::failure::Failure;

/// The mark of one VM, there or not.
#[derive(Debug)]
pub(crate) struct FirstStart {
    path: PathBuf,
}

impl FirstStart {
    pub(crate) fn of(stores: &LocalStores, key: &Key) -> FirstStart {
        let name = format!(".{}.not-started", key.name);
        FirstStart {
            path: stores.objects.file(key).with_file_name(name),
        }
    }

    /// True if the VM is marked. A mark for another run strategy is of a change that was never stored.
    pub(crate) fn is_due(&self, strategy: RunStrategy) -> bool {
        fs::read_to_string(&self.path).is_ok_and(|text| text == vm::strategy_name(strategy))
    }

    /// Marks the VM, before its object is stored. The directory reaches stable storage with the object.
    pub(crate) fn mark(&self, strategy: RunStrategy) -> Result<(), Failure> {
        let mut directories = DirBuilder::new();
        directories.recursive(true).mode(0o700);
        directories
            .create(self.directory())
            .and_then(|()| {
                let mut file = OpenOptions::new()
                    .write(true)
                    .create(true)
                    .truncate(true)
                    .mode(0o600)
                    .open(&self.path)?;
                file.write_all(vm::strategy_name(strategy).as_bytes())?;
                file.sync_all()
            })
            .map_err(Failure::at(format!("write {}", self.path.display())))
    }

    /// Removes the mark: the guest runs, or the VM is not to start any more.
    pub(crate) fn clear(&self) -> Result<(), Failure> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed
                // After a power cut the mark would start the VM once more.
                .and_then(|()| File::open(self.directory())?.sync_all())
                .map_err(Failure::at(format!("remove {}", self.path.display()))),
        }
    }

    fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }
}

#[cfg(test)]
mod tests {
    use husk_objects::Kind;

    use super::*;

    #[test]
    fn a_mark_is_for_one_run_strategy_until_it_is_cleared() {
        let folder = tempfile::tempdir().unwrap();
        let stores = LocalStores::at(folder.path());
        let start = FirstStart::of(&stores, &Key::new(Kind::VirtualMachine, "default", "demo"));
        start.clear().unwrap();
        assert!(!start.is_due(RunStrategy::Once));
        start.mark(RunStrategy::Once).unwrap();
        assert!(start.is_due(RunStrategy::Once) && !start.is_due(RunStrategy::RerunOnFailure));
        // It is no object.
        stores.objects.remove_leftovers().unwrap();
        let objects = stores.objects.read().unwrap();
        assert_eq!((objects.objects.len(), objects.damaged.len()), (0, 0));
        assert!(start.is_due(RunStrategy::Once));
        start.clear().unwrap();
        assert!(!start.is_due(RunStrategy::Once));
    }
}
