//! The store's directory.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use husk_vmi::subdomain_fault;
use husk_volumes::Sharing;
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, fstatvfs, renameat_with};
use rustix::io::Errno;

use crate::claim::{self, Claim, NewClaim};
use crate::copy;
use crate::error::ClaimError;
use crate::import::is_at;

/// Directory of changes; no namespace has a name with a dot.
const CHANGES: &str = ".changes";
pub(crate) const MANIFEST: &str = "claim.yaml";
pub(crate) const IMAGE: &str = "disk.img";
/// Longest file of a claim, in bytes.
const MAX_MANIFEST: u64 = 1 << 20;
/// Granularity of sizes, in bytes.
const MIB: u64 = 1 << 20;
/// Bytes left free on the file system.
const RESERVE: u64 = 64 << 20;

/// The volumes of a user.
#[derive(Debug, Clone)]
pub struct ClaimStore {
    pub(crate) path: PathBuf,
}

/// A directory in `.changes`, locked as long as this exists.
struct Change {
    path: PathBuf,
    directory: File,
}

impl ClaimStore {
    /// The store in the directory `path`, which need not exist.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> ClaimStore {
        ClaimStore { path: path.into() }
    }

    /// Path of a volume's image, whether it exists or not. The names must be those of a claim that there is, or be
    /// checked.
    #[must_use]
    pub fn image(&self, namespace: &str, name: &str) -> PathBuf {
        self.claim(namespace, name).join(IMAGE)
    }

    /// The claims, sorted by namespace and name, and an error for each one that is damaged.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn list(&self) -> Result<Vec<Result<Claim, ClaimError>>, ClaimError> {
        let mut claims = Vec::new();
        for namespace in names(&self.path)? {
            for name in names(&self.path.join(&namespace))? {
                match self.get(&namespace, &name) {
                    // It was removed meanwhile.
                    Err(ClaimError::NotFound(_)) => {}
                    claim => claims.push(claim),
                }
            }
        }
        Ok(claims)
    }

    /// A claim.
    ///
    /// # Errors
    /// There is none, or its file is damaged.
    pub fn get(&self, namespace: &str, name: &str) -> Result<Claim, ClaimError> {
        check(namespace, name)?;
        let (file, image) = (
            self.claim(namespace, name).join(MANIFEST),
            self.image(namespace, name),
        );
        let missing = |error: io::Error, path: &Path| match error.kind() {
            io::ErrorKind::NotFound => ClaimError::NotFound(claim::name(namespace, name)),
            _ => ClaimError::io(path)(error),
        };
        let length = fs::metadata(&file).map_err(|error| missing(error, &file))?.len();
        let damaged = |reason: String| ClaimError::Damaged {
            path: file.clone(),
            reason,
        };
        if length > MAX_MANIFEST {
            return Err(damaged(format!("it has {length} bytes")));
        }
        let text = fs::read_to_string(&file).map_err(|error| missing(error, &file))?;
        let object = claim::parse(&text, namespace, name).map_err(damaged)?;
        let state = fs::metadata(&image).map_err(|error| missing(error, &image))?;
        Ok(Claim {
            object,
            size: state.len(),
            allocated: state.blocks() * 512,
            in_use: husk_volumes::is_locked(&image),
        })
    }

    /// True if there is a claim of this name.
    #[must_use]
    pub fn has(&self, namespace: &str, name: &str) -> bool {
        check(namespace, name).is_ok() && self.claim(namespace, name).exists()
    }

    /// Makes an empty volume.
    ///
    /// # Errors
    /// The name is taken, the size is too small, or the store cannot be written.
    pub fn create(&self, claim: &NewClaim) -> Result<(), ClaimError> {
        self.add(claim, |_| Ok(()))
    }

    /// Makes a copy of a volume, which no VM may write meanwhile. Calls `progress` with bytes copied and total.
    ///
    /// # Errors
    /// As [`create`](Self::create); or the source does not exist or is larger, a VM uses it, or the copy does not fit.
    pub fn copy(
        &self,
        source: (&str, &str),
        new: &NewClaim,
        progress: &dyn Fn(u64, u64),
    ) -> Result<(), ClaimError> {
        let from = self.get(source.0, source.1)?;
        let path = self.image(source.0, source.1);
        let file = File::open(&path).map_err(ClaimError::io(&path))?;
        husk_volumes::lock_image(&file, &path, Sharing::ReadOnly)
            .map_err(|_| ClaimError::InUse(claim::name(source.0, source.1)))?;
        let size = in_mib(new.size);
        if size < from.size {
            return Err(ClaimError::Shrinks {
                name: claim::name(source.0, source.1),
                size: from.size,
                wanted: size,
            });
        }
        self.add(new, |image| {
            image.set_len(0).map_err(ClaimError::io(&self.path))?;
            let progress = |done| progress(done, from.size);
            self.fill(&file, image, from.allocated, husk_volumes::reflink, &progress)?;
            image.set_len(size).map_err(ClaimError::io(&path))
        })
    }

    /// Fills the empty file `to` by `reflink`, which takes no space, or else by a copy of `allocated` bytes.
    fn fill(
        &self,
        from: &File,
        to: &File,
        allocated: u64,
        reflink: impl FnOnce(&File, &File) -> io::Result<()>,
        progress: &dyn Fn(u64),
    ) -> Result<(), ClaimError> {
        if reflink(from, to).is_ok() {
            progress(from.metadata().map_err(ClaimError::io(&self.path))?.len());
            return Ok(());
        }
        let space = fstatvfs(to).map_err(ClaimError::io(&self.path))?;
        let free = space
            .f_bavail
            .saturating_mul(space.f_frsize)
            .saturating_sub(RESERVE);
        if allocated > free {
            return Err(ClaimError::NoSpace {
                path: self.path.clone(),
                needed: allocated,
                free,
            });
        }
        copy::copy(from, to, progress).map_err(ClaimError::io(&self.path))
    }

    /// Adds a claim whose image `fill` completes.
    fn add(
        &self,
        claim: &NewClaim,
        fill: impl FnOnce(&File) -> Result<(), ClaimError>,
    ) -> Result<(), ClaimError> {
        check(&claim.namespace, &claim.name)?;
        let size = in_mib(claim.size);
        if claim.size < MIB {
            return Err(ClaimError::TooSmall);
        }
        if self.has(&claim.namespace, &claim.name) {
            return Err(ClaimError::Exists(claim::name(&claim.namespace, &claim.name)));
        }
        let change = self.begin()?;
        let image = change.path.join(IMAGE);
        let file = new_file(&image)?;
        file.set_len(size).map_err(ClaimError::io(&image))?;
        fill(&file)?;
        file.sync_all().map_err(ClaimError::io(&image))?;
        self.place(&change.path, claim, size)
    }

    /// Gives a directory with a complete image its claim's file and its place.
    pub(crate) fn place(&self, directory: &Path, claim: &NewClaim, size: u64) -> Result<(), ClaimError> {
        check(&claim.namespace, &claim.name)?;
        let manifest = NewClaim {
            size,
            ..claim.clone()
        }
        .manifest();
        self.write(&directory.join(MANIFEST), manifest)?;
        let namespace = self.path.join(&claim.namespace);
        let target = self.claim(&claim.namespace, &claim.name);
        make_directory(&namespace)?;
        // The removal of the claim needs it, perhaps on a full disk.
        make_directory(&self.path.join(CHANGES))?;
        sync_directory(directory)?;
        match renameat_with(CWD, directory, CWD, &target, RenameFlags::NOREPLACE) {
            Err(Errno::EXIST) => {
                return Err(ClaimError::Exists(claim::name(&claim.namespace, &claim.name)));
            }
            other => other.map_err(ClaimError::io(&target))?,
        }
        sync_directory(&namespace)?;
        sync_directory(&self.path)
    }

    /// Grows a volume, also while a VM uses it.
    ///
    /// # Errors
    /// The volume is larger, does not exist, or the store cannot be written.
    pub fn resize(&self, namespace: &str, name: &str, size: u64) -> Result<u64, ClaimError> {
        let size = in_mib(size);
        let _lock = self.lock(namespace, name)?;
        let directory = self.claim(namespace, name);
        let image = directory.join(IMAGE);
        let file = OpenOptions::new()
            .write(true)
            .open(&image)
            .map_err(ClaimError::io(&image))?;
        let now = file.metadata().map_err(ClaimError::io(&image))?.len();
        if size < now {
            return Err(ClaimError::Shrinks {
                name: claim::name(namespace, name),
                size: now,
                wanted: size,
            });
        }
        file.set_len(size)
            .and_then(|()| file.sync_all())
            .map_err(ClaimError::io(&image))?;
        let manifest = directory.join(MANIFEST);
        let text = fs::read_to_string(&manifest).map_err(ClaimError::io(&manifest))?;
        self.write(&manifest, claim::grown(&text, size))?;
        Ok(size)
    }

    /// Replaces the labels and annotations of a claim.
    ///
    /// # Errors
    /// The volume does not exist, or the store cannot be written.
    pub fn relabel(
        &self,
        namespace: &str,
        name: &str,
        labels: &BTreeMap<String, String>,
        annotations: &BTreeMap<String, String>,
    ) -> Result<(), ClaimError> {
        let _lock = self.lock(namespace, name)?;
        let manifest = self.claim(namespace, name).join(MANIFEST);
        let text = fs::read_to_string(&manifest).map_err(ClaimError::io(&manifest))?;
        self.write(&manifest, claim::relabelled(&text, labels, annotations))
    }

    /// Locks a claim that is to change.
    fn lock(&self, namespace: &str, name: &str) -> Result<File, ClaimError> {
        self.get(namespace, name)?;
        let directory = self.claim(namespace, name);
        let lock = File::open(&directory).map_err(ClaimError::io(&directory))?;
        flock(&lock, FlockOperation::LockExclusive).map_err(ClaimError::io(&directory))?;
        Ok(lock)
    }

    /// Removes a volume and its data.
    ///
    /// # Errors
    /// It does not exist, a VM uses it, or the store cannot be written.
    pub fn remove(&self, namespace: &str, name: &str) -> Result<(), ClaimError> {
        check(namespace, name)?;
        let directory = self.claim(namespace, name);
        let unknown = || ClaimError::NotFound(claim::name(namespace, name));
        if !directory.is_dir() {
            return Err(unknown());
        }
        let missing = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => unknown(),
            _ => ClaimError::io(&directory)(error),
        };
        let lock = File::open(&directory).map_err(missing)?;
        flock(&lock, FlockOperation::LockExclusive).map_err(ClaimError::io(&directory))?;
        // Another process may have removed it before it was locked.
        if !is_at(&lock, &directory) {
            return Err(unknown());
        }
        let image = directory.join(IMAGE);
        // Locked until it is removed, so that no VM opens it meanwhile.
        let used = match File::options().read(true).write(true).open(&image) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            other => Some(other.map_err(ClaimError::io(&image))?),
        };
        if let Some(used) = &used {
            husk_volumes::lock_image(used, &image, Sharing::Exclusive)
                .map_err(|_| ClaimError::InUse(claim::name(namespace, name)))?;
        }
        let changes = self.changes()?;
        // A new directory would take space, which a full disk does not have.
        let moved = changes.join(uuid::Uuid::new_v4().to_string());
        fs::rename(&directory, &moved).map_err(missing)?;
        let parent = self.path.join(namespace);
        sync_directory(&parent)?;
        fs::remove_dir_all(&moved).map_err(ClaimError::io(&moved))?;
        // It fails if there are other claims.
        let _ = fs::remove_dir(&parent);
        Ok(())
    }

    /// The directory of changes, without what dead processes have left.
    fn changes(&self) -> Result<PathBuf, ClaimError> {
        let changes = self.path.join(CHANGES);
        make_directory(&changes)?;
        for entry in fs::read_dir(&changes)
            .map_err(ClaimError::io(&changes))?
            .flatten()
        {
            let Ok(left) = File::open(entry.path()) else {
                continue;
            };
            // Locked until it is removed: its process may be about to lock it.
            if flock(&left, FlockOperation::NonBlockingLockExclusive).is_ok() {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        Ok(changes)
    }

    /// Begins a change.
    fn begin(&self) -> Result<Change, ClaimError> {
        let changes = self.changes()?;
        loop {
            let path = changes.join(uuid::Uuid::new_v4().to_string());
            make_directory(&path)?;
            let opened = open_if_there(&path).inspect_err(|_| drop(fs::remove_dir(&path)));
            let Some(directory) = opened? else {
                continue;
            };
            flock(&directory, FlockOperation::LockExclusive).map_err(ClaimError::io(&path))?;
            // Another process may have removed it before it was locked.
            if path.exists() {
                return Ok(Change { path, directory });
            }
        }
    }

    /// Replaces a claim's file.
    fn write(&self, file: &Path, manifest: Result<String, String>) -> Result<(), ClaimError> {
        let text = manifest.map_err(|reason| ClaimError::Damaged {
            path: file.to_owned(),
            reason,
        })?;
        let new = file.with_extension("new");
        let _ = fs::remove_file(&new);
        let mut opened = new_file(&new)?;
        opened
            .write_all(text.as_bytes())
            .and_then(|()| opened.sync_all())
            .and_then(|()| fs::rename(&new, file))
            .map_err(ClaimError::io(file))?;
        sync_directory(file.parent().unwrap_or(&self.path))
    }

    /// Path of a claim with a checked name.
    fn claim(&self, namespace: &str, name: &str) -> PathBuf {
        self.path.join(namespace).join(name)
    }
}

/// Removes what a change has left.
impl Drop for Change {
    fn drop(&mut self) {
        // After a claim was renamed to its place, nothing has this path.
        let _ = fs::remove_dir_all(&self.path);
        let _ = flock(&self.directory, FlockOperation::Unlock);
    }
}

/// Checks names that become parts of a path.
pub(crate) fn check(namespace: &str, name: &str) -> Result<(), ClaimError> {
    for name in [namespace, name] {
        if let Some(fault) = subdomain_fault(name) {
            return Err(ClaimError::Name {
                name: name.to_owned(),
                fault,
            });
        }
    }
    Ok(())
}

/// A size rounded up to whole MiB.
pub(crate) fn in_mib(size: u64) -> u64 {
    size.div_ceil(MIB).saturating_mul(MIB)
}

fn new_file(path: &Path) -> Result<File, ClaimError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(ClaimError::io(path))
}

/// Makes a directory, and those above it, for the owner only.
pub(crate) fn make_directory(path: &Path) -> Result<(), ClaimError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(ClaimError::io(path))
}

/// Opens a directory; none if another process has removed it.
pub(crate) fn open_if_there(path: &Path) -> Result<Option<File>, ClaimError> {
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some).map_err(ClaimError::io(path)),
    }
}

pub(crate) fn sync_directory(path: &Path) -> Result<(), ClaimError> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .map_err(ClaimError::io(path))
}

/// Names of directories that claims and namespaces may have, sorted; those of the store itself begin with a dot.
fn names(directory: &Path) -> Result<Vec<String>, ClaimError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(ClaimError::io(directory))?,
    };
    let directories = entries.flatten().filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> = directories
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| subdomain_fault(name).is_none())
        .collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests;
