//! Volumes that are being filled: what is there stays after a power cut, and the next import goes on with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::claim::{self, NewClaim};
use crate::error::ClaimError;
use crate::store::{ClaimStore, IMAGE, check, in_mib, make_directory, open_if_there, sync_directory};

/// Directory of imports; no namespace has a name with a dot.
const IMPORTS: &str = ".imports";

/// A volume that this process fills. Its directory is kept until [`finish`](Import::finish), unless it is abandoned.
#[derive(Debug)]
pub struct Import {
    store: ClaimStore,
    path: PathBuf,
    _lock: File,
}

impl ClaimStore {
    /// Begins to fill the volume of a claim that does not exist, or goes on with it. Waits for another process that
    /// fills it.
    ///
    /// # Errors
    /// The claim exists, perhaps since the other process is done, or the store cannot be written.
    pub fn begin_import(&self, namespace: &str, name: &str) -> Result<Import, ClaimError> {
        check(namespace, name)?;
        let path = self.import_path(namespace, name);
        loop {
            if self.has(namespace, name) {
                return Err(ClaimError::Exists(claim::name(namespace, name)));
            }
            make_directory(&path)?;
            sync_directory(&self.path)?;
            let Some(lock) = open_if_there(&path)? else {
                continue;
            };
            flock(&lock, FlockOperation::LockExclusive).map_err(ClaimError::io(&path))?;
            // The other process may have finished or abandoned it.
            if is_at(&lock, &path) {
                return Ok(Import {
                    store: self.clone(),
                    path,
                    _lock: lock,
                });
            }
        }
    }

    /// True if a process fills the volume now.
    #[must_use]
    pub fn is_importing(&self, namespace: &str, name: &str) -> bool {
        check(namespace, name).is_ok()
            && File::open(self.import_path(namespace, name)).is_ok_and(|file| {
                flock(&file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
            })
    }

    /// Removes what an import has left that nobody goes on with.
    ///
    /// # Errors
    /// A process fills the volume, or the store cannot be written.
    pub fn abandon_import(&self, namespace: &str, name: &str) -> Result<(), ClaimError> {
        check(namespace, name)?;
        let path = self.import_path(namespace, name);
        loop {
            let Some(lock) = open_if_there(&path)? else {
                return Ok(());
            };
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => return Err(ClaimError::InUse(claim::name(namespace, name))),
                other => other.map_err(ClaimError::io(&path))?,
            }
            // Before the lock, another process can remove it, and a third process can begin a new import at this path.
            if is_at(&lock, &path) {
                return fs::remove_dir_all(&path).map_err(ClaimError::io(&path));
            }
        }
    }

    /// Claims of which an import has left something, by namespace and name.
    #[must_use]
    pub fn imports(&self) -> Vec<(String, String)> {
        let entries = fs::read_dir(self.path.join(IMPORTS)).into_iter().flatten();
        let names = entries
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok());
        names
            .filter_map(|name| {
                let (namespace, name) = name.split_once(':')?;
                Some((namespace.to_owned(), name.to_owned()))
            })
            .collect()
    }

    fn import_path(&self, namespace: &str, name: &str) -> PathBuf {
        self.path.join(IMPORTS).join(format!("{namespace}:{name}"))
    }
}

impl Import {
    /// The directory in which to make `disk.img`, for this import alone.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.path
    }

    /// Makes the directory, which has a complete `disk.img` and nothing else, the claim's. Its size becomes one of
    /// whole MiB, as that of other volumes.
    ///
    /// # Errors
    /// The claim exists, or the store cannot be written.
    pub fn finish(self, claim: &NewClaim) -> Result<(), ClaimError> {
        let image = self.path.join(IMAGE);
        let file = File::options()
            .write(true)
            .open(&image)
            .map_err(ClaimError::io(&image))?;
        let size = in_mib(file.metadata().map_err(ClaimError::io(&image))?.len());
        file.set_len(size)
            .and_then(|()| file.sync_all())
            .map_err(ClaimError::io(&image))?;
        self.store.place(&self.path, claim, size)
    }

    /// Removes all of it.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn abandon(self) -> Result<(), ClaimError> {
        fs::remove_dir_all(&self.path).map_err(ClaimError::io(&self.path))
    }
}

/// True if the open directory is the one at `path`.
pub(crate) fn is_at(directory: &File, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (rustix::fs::fstat(directory), rustix::fs::stat(path)) else {
        return false;
    };
    (open.st_dev, open.st_ino) == (named.st_dev, named.st_ino)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, ClaimStore) {
        let home = tempfile::tempdir().unwrap();
        let store = ClaimStore::at(home.path().join("volumes"));
        (home, store)
    }

    #[test]
    fn an_import_goes_on_with_what_was_left() {
        let (_home, store) = store();
        let import = store.begin_import("default", "data").unwrap();
        fs::write(import.directory().join("download"), "part").unwrap();
        assert!(store.is_importing("default", "data"));
        assert!(store.list().unwrap().is_empty());
        drop(import);
        assert!(!store.is_importing("default", "data"));
        assert_eq!(store.imports(), [("default".to_owned(), "data".to_owned())]);

        let import = store.begin_import("default", "data").unwrap();
        let download = import.directory().join("download");
        assert_eq!(fs::read_to_string(&download).unwrap(), "part");
        fs::remove_file(download).unwrap();
        let image = File::create(import.directory().join(IMAGE)).unwrap();
        // 500M in a manifest is no whole number of sectors.
        image.set_len((3 << 20) - 256).unwrap();
        let mut claim = NewClaim::new("default", "data", 0);
        claim.labels.insert("a".into(), "b".into());
        import.finish(&claim).unwrap();
        let made = store.get("default", "data").unwrap();
        assert_eq!(made.size, 3 << 20);
        assert_eq!(made.object.metadata.labels["a"], "b");
        assert!(store.imports().is_empty());
        let again = store.begin_import("default", "data");
        assert!(matches!(again, Err(ClaimError::Exists(_))));
    }

    #[test]
    fn a_second_process_waits_for_the_first() {
        let (_home, store) = store();
        let import = store.begin_import("default", "data").unwrap();
        let other = store.clone();
        let waits = std::thread::spawn(move || other.begin_import("default", "data").map(drop));
        File::create(import.directory().join(IMAGE))
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
        assert!(matches!(
            store.abandon_import("default", "data"),
            Err(ClaimError::InUse(_))
        ));
        import.finish(&NewClaim::new("default", "data", 0)).unwrap();
        assert!(matches!(waits.join().unwrap(), Err(ClaimError::Exists(_))));
    }

    #[test]
    fn a_claim_of_an_import_is_removed_without_a_new_directory() {
        let (_home, store) = store();
        let import = store.begin_import("default", "data").unwrap();
        let image = File::create(import.directory().join(IMAGE)).unwrap();
        image.set_len(1 << 20).unwrap();
        import.finish(&NewClaim::new("default", "data", 0)).unwrap();
        assert!(store.path.join(".changes").is_dir());
    }

    #[test]
    fn what_an_import_left_is_removed() {
        let (_home, store) = store();
        store.abandon_import("default", "data").unwrap();
        let import = store.begin_import("default", "data").unwrap();
        fs::write(import.directory().join("download"), "part").unwrap();
        drop(import);
        store.abandon_import("default", "data").unwrap();
        assert!(store.imports().is_empty());
        store.begin_import("default", "data").unwrap().abandon().unwrap();
        assert!(store.imports().is_empty());
    }
}
