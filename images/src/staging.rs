//! An image that is being pulled.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use husk_volumes::{ImageFile, unpack_image};
use oci_spec::image::{Descriptor, ImageIndexBuilder};
use rustix::fs::{FlockOperation, fstatvfs, syncfs};
use sha2::{Digest, Sha256};

use crate::error::StoreError;
use crate::store::{ImageStore, SOLE_DISK, StoredImage, make_directory, sync_directory};
use crate::store_lock::StoreLock;

/// Bytes left free on the file system.
const RESERVE: u64 = 64 << 20;
/// Read buffer, in bytes.
const BUFFER: usize = 128 << 10;

/// The staging directory of an image, locked as long as this exists.
#[derive(Debug)]
pub struct Staging {
    store: ImageStore,
    digest: String,
    path: PathBuf,
    /// Holds the lock.
    _directory: File,
}

/// A blob that is being fetched.
#[derive(Debug)]
pub struct Blob {
    /// The file to append to.
    pub file: File,
    /// Bytes that an earlier attempt fetched.
    pub have: u64,
    /// Hash of these bytes.
    pub hash: Sha256,
}

impl Staging {
    pub(crate) fn open(store: &ImageStore, digest: &str) -> Result<Staging, StoreError> {
        let path = store.staging().join(digest.replace(':', "-"));
        loop {
            make_directory(&path)?;
            let directory = match File::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(StoreError::io(&path))?,
            };
            rustix::fs::flock(&directory, FlockOperation::LockExclusive).map_err(StoreError::errno(&path))?;
            // The process that held the lock has finished the image, or has removed what it had of it.
            if is_at(&directory, &path).map_err(StoreError::io(&path))? {
                make_directory(&path.join("blobs/sha256"))?;
                return Ok(Staging {
                    store: store.clone(),
                    digest: digest.to_owned(),
                    path,
                    _directory: directory,
                });
            }
        }
    }

    /// Fails unless the file system has room for `needed` bytes.
    ///
    /// # Errors
    /// It has not.
    pub fn require_space(&self, needed: u64) -> Result<(), StoreError> {
        let space = fstatvfs(&self._directory).map_err(StoreError::errno(&self.path))?;
        let free = space
            .f_bavail
            .saturating_mul(space.f_frsize)
            .saturating_sub(RESERVE);
        if needed > free {
            let path = self.store.path().to_owned();
            return Err(StoreError::NoSpace { path, needed, free });
        }
        Ok(())
    }

    /// Bytes of a blob that were fetched. `hex` is its SHA-256.
    #[must_use]
    pub fn fetched(&self, hex: &str) -> u64 {
        let files = [self.blob_path(hex), self.partial_path(hex)];
        let sizes = files
            .iter()
            .filter_map(|file| Some(fs::metadata(file).ok()?.len()));
        sizes.max().unwrap_or(0)
    }

    /// Path of a complete blob.
    fn blob_path(&self, hex: &str) -> PathBuf {
        self.path.join("blobs/sha256").join(hex)
    }

    /// Opens a blob to fetch, or to go on with; `None` if it is complete. `hex` is its SHA-256.
    ///
    /// # Errors
    /// The store cannot be read or written.
    pub fn blob(&self, hex: &str) -> Result<Option<Blob>, StoreError> {
        if self.blob_path(hex).exists() {
            return Ok(None);
        }
        let path = self.partial_path(hex);
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&path)
            .map_err(StoreError::io(&path))?;
        let mut hash = Sha256::new();
        let mut have = 0;
        let mut buffer = vec![0; BUFFER];
        loop {
            let read = file.read(&mut buffer).map_err(StoreError::io(&path))?;
            if read == 0 {
                return Ok(Some(Blob { file, have, hash }));
            }
            hash.update(&buffer[..read]);
            have += read as u64;
        }
    }

    fn partial_path(&self, hex: &str) -> PathBuf {
        self.path.join("blobs").join(format!("{hex}.partial"))
    }

    /// Takes a blob whose digest was checked.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn blob_complete(&self, hex: &str) -> Result<(), StoreError> {
        let path = self.partial_path(hex);
        fs::rename(&path, self.blob_path(hex)).map_err(StoreError::io(&path))
    }

    /// Writes a small blob whose digest was checked.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn write_blob(&self, hex: &str, content: &[u8]) -> Result<(), StoreError> {
        let path = self.blob_path(hex);
        fs::write(&path, content).map_err(StoreError::io(&path))
    }

    /// Gives the image its name if the store has all of its wanted files.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn reuse(&self, image: &StoredImage, wanted: &[ImageFile]) -> Result<bool, StoreError> {
        let _lock = StoreLock::shared(self.store.path())?;
        let complete = wanted.iter().all(|file| self.store.has(&self.digest, file));
        if complete {
            self.store.set_name(image)?;
        }
        Ok(complete)
    }

    /// Unpacks the wanted files, puts the image into the store, or adds the files that the store's image lacks, and
    /// gives it its name. Calls `progress` with compressed bytes read and total. Blocks.
    ///
    /// # Errors
    /// The image cannot be used; nothing of it is left then.
    pub fn finish(
        self,
        manifest: &Descriptor,
        image: &StoredImage,
        wanted: &[ImageFile],
        progress: &dyn Fn(u64, u64),
    ) -> Result<(), StoreError> {
        let unpacked = self.unpack(manifest, wanted, progress);
        let done = unpacked.and_then(|files| {
            let _lock = StoreLock::shared(self.store.path())?;
            self.put(&files)?;
            self.store.set_name(image)
        });
        self.abandon();
        done
    }

    fn unpack(
        &self,
        manifest: &Descriptor,
        wanted: &[ImageFile],
        progress: &dyn Fn(u64, u64),
    ) -> Result<Vec<PathBuf>, StoreError> {
        let rootfs = self.path.join("rootfs");
        remove_tree(&rootfs)?;
        let index = ImageIndexBuilder::default()
            .schema_version(2_u32)
            .manifests([manifest.clone()])
            .build()
            .and_then(|index| index.to_string())
            .map_err(|error| StoreError::Image(error.to_string()))?;
        let index_file = self.path.join("index.json");
        fs::write(&index_file, index).map_err(StoreError::io(&index_file))?;
        let files = unpack_image(&self.path, wanted, &rootfs, progress).map_err(StoreError::unpacking)?;
        let mut places = wanted.iter().zip(&files);
        if let Some((_, disk)) = places.find(|(wanted, _)| **wanted == ImageFile::Disk) {
            let record = self.path.join(SOLE_DISK);
            fs::write(&record, disk.as_os_str().as_bytes()).map_err(StoreError::io(&record))?;
        }
        let manifest_file = self.path.join("manifest.json");
        let kept = self.blob_path(manifest.digest().digest());
        fs::rename(&kept, &manifest_file).map_err(StoreError::io(&kept))?;
        remove_tree(&self.path.join("blobs"))?;
        fs::remove_file(&index_file).map_err(StoreError::io(&index_file))?;
        syncfs(&self._directory).map_err(StoreError::errno(&self.path))?;
        Ok(files)
    }

    /// Puts what was unpacked into the store.
    fn put(&self, files: &[PathBuf]) -> Result<(), StoreError> {
        let target = self.store.image(&self.digest);
        if target.is_dir() {
            return self.add_to(&target, files);
        }
        fs::rename(&self.path, &target).map_err(StoreError::io(&target))?;
        sync_directory(self.store.path())
    }

    /// Moves those of the unpacked files that a stored image lacks into it. VMs have the others open, and snapshots
    /// know them by their inodes.
    fn add_to(&self, target: &Path, files: &[PathBuf]) -> Result<(), StoreError> {
        for file in files {
            let (unpacked, place) = (
                self.path.join("rootfs").join(file),
                target.join("rootfs").join(file),
            );
            if place.exists() {
                continue;
            }
            make_directory(place.parent().unwrap_or(target))?;
            fs::rename(&unpacked, &place).map_err(StoreError::io(&place))?;
        }
        let record = self.path.join(SOLE_DISK);
        if record.exists() {
            fs::rename(&record, target.join(SOLE_DISK)).map_err(StoreError::io(&record))?;
        }
        syncfs(&self._directory).map_err(StoreError::errno(&self.path))
    }

    /// Removes what was fetched.
    pub fn abandon(self) {
        // A finished image has another path, and another pull may have begun at this one.
        if is_at(&self._directory, &self.path).is_ok_and(|own| own) {
            let _ = fs::remove_dir_all(&self.path);
        }
    }

    #[cfg(test)]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// True if the open directory is still the one at a path.
pub(crate) fn is_at(directory: &File, path: &Path) -> io::Result<bool> {
    let own = directory.metadata()?;
    Ok(fs::metadata(path).is_ok_and(|now| now.ino() == own.ino() && now.dev() == own.dev()))
}

fn remove_tree(path: &Path) -> Result<(), StoreError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(StoreError::io(path)(error)),
        _ => Ok(()),
    }
}
