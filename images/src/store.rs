//! The store's directory.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use husk_volumes::ImageFile;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::StoreError;
use crate::name::ImageName;
use crate::staging::Staging;
use crate::store_lock::StoreLock;
use crate::trash::Trash;

/// Longest file of a name, in bytes.
const MAX_NAME_FILE: u64 = 16 << 10;
/// Name of the file with the path of an image's only disk.
pub(crate) const SOLE_DISK: &str = "sole-disk";
/// Depth of the files of an image, to which sizes are counted.
pub(crate) const MAX_DEPTH: usize = 64;

/// The image store of a user.
#[derive(Debug, Clone)]
pub struct ImageStore {
    path: PathBuf,
}

/// A name in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredImage {
    /// The normalised name.
    pub name: String,
    /// Digest of the image's manifest for this platform.
    pub digest: String,
    /// Digest that the registry has for the name: of an index, or the same.
    pub registry_digest: String,
    /// When it was pulled.
    pub pulled: Timestamp,
    /// Allocated size of the unpacked files, in bytes. Computed, not stored.
    #[serde(default, skip_serializing)]
    pub size: u64,
}

/// The result of [`ImageStore::prune`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Images without a name, pulls that were not finished, and names without an image.
    pub removed: usize,
    /// Allocated size, in bytes.
    pub bytes: u64,
}

impl ImageStore {
    /// The store `images` in the [`data_directory`].
    ///
    /// # Errors
    /// See there.
    pub fn locate() -> Result<ImageStore, StoreError> {
        Ok(ImageStore::at(data_directory()?.join("images")))
    }

    /// The store in the directory `path`.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> ImageStore {
        ImageStore { path: path.into() }
    }

    /// The store's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names in the store, sorted.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<StoredImage>, StoreError> {
        let mut images = Vec::new();
        for entry in entries(&self.names())? {
            if entry.extension().is_some_and(|extension| extension == "json")
                && let Some(mut image) = read_name(&entry)?
                && self.image(&image.digest).is_dir()
            {
                image.size = allocated(&self.image(&image.digest), MAX_DEPTH);
                images.push(image);
            }
        }
        images.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(images)
    }

    /// The image of a name, if the store has it.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn find(&self, name: &ImageName) -> Result<Option<StoredImage>, StoreError> {
        let found = read_name(&self.name_file(&name.to_string()))?;
        Ok(found.filter(|image| self.image(&image.digest).is_dir()))
    }

    /// Directory with the files of an image under their paths in it.
    #[must_use]
    pub fn rootfs(&self, digest: &str) -> PathBuf {
        self.image(digest).join("rootfs")
    }

    /// True if an image has a file.
    #[must_use]
    pub fn has(&self, digest: &str, file: &ImageFile) -> bool {
        let rootfs = self.rootfs(digest);
        match file {
            // A file in folder `disk` need not be the only one there: it may have been wanted by its path.
            ImageFile::Disk => fs::read(self.image(digest).join(SOLE_DISK))
                .is_ok_and(|path| rootfs.join(OsStr::from_bytes(&path)).is_file()),
            ImageFile::At(path) => rootfs.join(path).is_file(),
        }
    }

    /// Begins or continues to pull an image. Waits while another process pulls the same, which may have put it into the
    /// store then. Blocks.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn stage(&self, digest: &str) -> Result<Staging, StoreError> {
        Staging::open(self, digest)
    }

    /// Gives an image a name, which may have stood for another image. The caller holds the store's lock.
    pub(crate) fn set_name(&self, image: &StoredImage) -> Result<(), StoreError> {
        make_directory(&self.names())?;
        let file = self.name_file(&image.name);
        let text = serde_json::to_string(image).map_err(|error| StoreError::io(&file)(error.into()))?;
        write_atomically(&file, text.as_bytes())
    }

    /// Removes a name, and its image unless another name has it.
    ///
    /// # Errors
    /// The store does not have the name, a running VM uses the image, or the store cannot be written.
    pub fn remove(&self, name: &ImageName) -> Result<u64, StoreError> {
        let name = name.to_string();
        let file = self.name_file(&name);
        let lock = StoreLock::exclusive(&self.path)?;
        let image = read_name(&file)?.ok_or_else(|| StoreError::NotFound(name.clone()))?;
        let others = self.list()?;
        let shared = others
            .iter()
            .any(|other| other.name != name && other.digest == image.digest);
        if !shared && self.is_used(&image.digest) {
            return Err(StoreError::InUse(name));
        }
        fs::remove_file(&file).map_err(StoreError::io(&file))?;
        sync_directory(&self.names())?;
        let trash = match shared {
            true => None,
            false => Trash::of(self, &self.image(&image.digest))?,
        };
        drop(lock);
        trash.map_or(Ok(0), Trash::remove)
    }

    /// Removes images without a name that no VM uses, and pulls that no process goes on with. Waits a little for
    /// processes that put something into the store. Blocks.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn prune(&self) -> Result<Pruned, StoreError> {
        let lock = StoreLock::exclusive(&self.path)?;
        let mut pruned = Pruned::default();
        for entry in entries(&self.names())? {
            let known = match entry.extension().is_some_and(|extension| extension == "json") {
                true => read_name(&entry)?.is_some_and(|image| self.image(&image.digest).is_dir()),
                false => false,
            };
            if !known {
                fs::remove_file(&entry).map_err(StoreError::io(&entry))?;
                pruned.removed += 1;
            }
        }
        let mut trash = Vec::new();
        for entry in entries(&self.staging())? {
            trash.extend(Trash::of(self, &entry)?);
        }
        let named: Vec<String> = self.list()?.into_iter().map(|image| image.digest).collect();
        for entry in entries(&self.path)? {
            let digest = entry
                .file_name()
                .and_then(|name| name.to_str())
                .and_then(digest_of);
            if let Some(digest) = digest
                && !named.contains(&digest)
                && !self.is_used(&digest)
            {
                trash.extend(Trash::of(self, &entry)?);
            }
        }
        drop(lock);
        for trash in trash {
            pruned.bytes += trash.remove()?;
            pruned.removed += 1;
        }
        Ok(pruned)
    }

    /// True if a VM has a file of the image open: it holds a lock on it.
    fn is_used(&self, digest: &str) -> bool {
        files(&self.rootfs(digest), MAX_DEPTH)
            .iter()
            .any(|file| husk_volumes::is_locked(file))
    }

    pub(crate) fn image(&self, digest: &str) -> PathBuf {
        self.path.join(digest.replace(':', "-"))
    }

    pub(crate) fn staging(&self) -> PathBuf {
        self.path.join("staging")
    }

    fn names(&self) -> PathBuf {
        self.path.join("names")
    }

    fn name_file(&self, name: &str) -> PathBuf {
        let hash: String = Sha256::digest(name)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        self.names().join(format!("{hash}.json"))
    }
}

/// Directory for what Husk keeps: `HUSK_DATA_DIR`, else `/var/lib/husk` for root, else `$XDG_DATA_HOME/husk`.
///
/// # Errors
/// No such directory is known for an ordinary user.
pub fn data_directory() -> Result<PathBuf, StoreError> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(path) = set("HUSK_DATA_DIR") {
        return Ok(path);
    }
    if rustix::process::geteuid().is_root() {
        return Ok(PathBuf::from("/var/lib/husk"));
    }
    let home = || set("HOME").map(|home| home.join(".local/share"));
    let data = set("XDG_DATA_HOME")
        .or_else(home)
        .ok_or(StoreError::NoDataDirectory)?;
    Ok(data.join("husk"))
}

/// The digest that a directory's name refers to.
fn digest_of(name: &str) -> Option<String> {
    let hex = name.strip_prefix("sha256-")?;
    Some(format!("sha256:{hex}"))
}

fn read_name(file: &Path) -> Result<Option<StoredImage>, StoreError> {
    let bytes = match fs::metadata(file) {
        Ok(metadata) if metadata.len() <= MAX_NAME_FILE => fs::read(file),
        Ok(_) => return Ok(None),
        Err(error) => Err(error),
    };
    match bytes {
        // Damaged by hand: as if it were not there.
        Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(StoreError::io(file)(error)),
    }
}

/// Makes a directory, and those above it, for the owner only.
pub(crate) fn make_directory(path: &Path) -> Result<(), StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(StoreError::io(path))
}

/// Replaces a file so that a power cut leaves the old or the new content.
pub(crate) fn write_atomically(file: &Path, content: &[u8]) -> Result<(), StoreError> {
    let new = file.with_extension(format!("new-{}", std::process::id()));
    let write = || {
        let mut opened = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        opened.write_all(content)?;
        opened.sync_all()?;
        fs::rename(&new, file)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&new);
        StoreError::io(file)(error)
    })?;
    sync_directory(file.parent().unwrap_or(Path::new("/")))
}

pub(crate) fn sync_directory(path: &Path) -> Result<(), StoreError> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .map_err(StoreError::io(path))
}

/// Paths in a directory; none if it does not exist.
fn entries(directory: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(StoreError::io(directory))?,
    };
    entries
        .map(|entry| entry.map(|entry| entry.path()).map_err(StoreError::io(directory)))
        .collect()
}

/// Regular files below a directory.
fn files(directory: &Path, depth: usize) -> Vec<PathBuf> {
    let Some(depth) = depth.checked_sub(1) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for path in entries(directory).unwrap_or_default() {
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_dir() => found.extend(files(&path, depth)),
            Ok(metadata) if metadata.is_file() => found.push(path),
            _ => {}
        }
    }
    found
}

/// Allocated bytes of the files below a directory.
pub(crate) fn allocated(directory: &Path, depth: usize) -> u64 {
    let sizes = files(directory, depth);
    let sizes = sizes.iter().filter_map(|file| fs::symlink_metadata(file).ok());
    sizes.map(|metadata| metadata.blocks() * 512).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(name: &str, digit: char) -> StoredImage {
        StoredImage {
            name: name.parse::<ImageName>().unwrap().to_string(),
            digest: format!("sha256:{}", digit.to_string().repeat(64)),
            registry_digest: String::new(),
            pulled: Timestamp::UNIX_EPOCH,
            size: 0,
        }
    }

    fn put(store: &ImageStore, image: &StoredImage) -> PathBuf {
        let disk = store.rootfs(&image.digest).join("disk/a.img");
        fs::create_dir_all(disk.parent().unwrap()).unwrap();
        fs::write(&disk, [1; 8192]).unwrap();
        store.set_name(image).unwrap();
        disk
    }

    #[test]
    fn what_a_power_cut_leaves_is_not_listed_and_is_pruned() {
        let home = tempfile::tempdir().unwrap();
        let store = ImageStore::at(home.path().join("images"));
        assert_eq!(store.prune().unwrap(), Pruned::default());
        let kept = image("kept:1", 'a');
        let disk = put(&store, &kept);
        // The image was renamed, but has no name yet.
        let unnamed = put(&store, &image("unnamed:1", 'b'));
        fs::remove_file(store.name_file(&image("unnamed:1", 'b').name)).unwrap();
        // A name whose image was removed, and one that was being written.
        store.set_name(&image("gone:1", 'c')).unwrap();
        fs::write(store.names().join("x.new-1"), "{").unwrap();
        fs::write(store.names().join("damaged.json"), "{").unwrap();
        // A pull that goes on, and one whose process has died.
        let running = store.stage(&image("d", 'd').digest).unwrap();
        let dead = store.staging().join("sha256-dead");
        fs::create_dir_all(&dead).unwrap();

        let names = |store: &ImageStore| {
            store
                .list()
                .unwrap()
                .into_iter()
                .map(|image| image.name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names(&store), ["docker.io/library/kept:1"]);
        assert_eq!(store.prune().unwrap().removed, 5);
        assert!(disk.exists() && !unnamed.exists() && !dead.exists());
        assert_eq!(names(&store), ["docker.io/library/kept:1"]);
        drop(running);
        assert_eq!(store.prune().unwrap().removed, 1);
        assert_eq!(store.prune().unwrap().removed, 0);
    }

    #[test]
    fn nothing_is_removed_while_something_is_put_into_the_store() {
        let home = tempfile::tempdir().unwrap();
        let store = ImageStore::at(home.path().join("images"));
        let new = image("new:1", 'a');
        let lock = StoreLock::shared(store.path()).unwrap();
        // A pull renames its image, and then gives it its name.
        let disk = put(&store, &new);
        let name = store.name_file(&new.name);
        fs::rename(&name, name.with_extension("new-1")).unwrap();
        let pruning = std::thread::spawn({
            let store = store.clone();
            move || store.prune().unwrap()
        });
        std::thread::sleep(std::time::Duration::from_millis(200));
        fs::rename(name.with_extension("new-1"), &name).unwrap();
        drop(lock);
        assert_eq!(pruning.join().unwrap(), Pruned::default());
        assert!(disk.exists());
    }

    #[test]
    fn what_another_process_removes_is_left_to_it() {
        let home = tempfile::tempdir().unwrap();
        let store = ImageStore::at(home.path().join("images"));
        let images = [image("a:1", 'a'), image("b:1", 'b')];
        let trash = |image: &StoredImage| {
            put(&store, image);
            Trash::of(&store, &store.image(&image.digest)).unwrap().unwrap()
        };
        let removals = [trash(&images[0]), trash(&images[1])];
        // Two names without an image.
        assert_eq!(store.prune().unwrap().removed, 2);
        assert!(removals.into_iter().all(|trash| trash.remove().unwrap() >= 8192));
    }

    #[test]
    fn a_pull_that_has_ended_leaves_the_next_one_alone() {
        let home = tempfile::tempdir().unwrap();
        let store = ImageStore::at(home.path().join("images"));
        let digest = image("a:1", 'a').digest;
        let first = store.stage(&digest).unwrap();
        fs::rename(first.path(), store.image(&digest)).unwrap();
        let second = store.stage(&digest).unwrap();
        first.abandon();
        assert!(second.path().exists());
    }

    #[test]
    fn image_of_a_running_vm_stays() {
        let home = tempfile::tempdir().unwrap();
        let store = ImageStore::at(home.path().join("images"));
        let used = image("used:1", 'a');
        let disk = put(&store, &used);
        let name: ImageName = "used:1".parse().unwrap();
        let opened = File::open(&disk).unwrap();
        // SAFETY: flock consists of integers, for which zeroes are valid: the whole file.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = libc::F_RDLCK as libc::c_short;
        // SAFETY: the kernel reads one flock, and the descriptor is open.
        let locked = unsafe {
            libc::fcntl(
                std::os::fd::AsRawFd::as_raw_fd(&opened),
                libc::F_OFD_SETLK,
                &raw const lock,
            )
        };
        assert_eq!(locked, 0);
        assert!(matches!(store.remove(&name), Err(StoreError::InUse(_))));
        fs::remove_file(store.name_file(&used.name)).unwrap();
        assert_eq!(store.prune().unwrap().removed, 0);
        drop(opened);
        assert_eq!(store.prune().unwrap().removed, 1);
    }
}
