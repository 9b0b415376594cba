//! The store's directory.

mod damaged;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use husk_vmi::MANIFEST_LIMIT;
use jiff::{Timestamp, Unit};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Map, Value, json};

use crate::error::ObjectError;
use crate::key::{CLUSTER, Key, Kind};
use crate::stored::{Objects, StoredObject};

const LOCK: &str = ".lock";
/// End of the name of a file that is not complete.
const NEW: &str = ".new";
/// Mode bit of the file of an object whose deletion has begun on a full disk. It means nothing to Linux, and takes no
/// space.
const DELETING: u32 = 0o1000;
/// Fields of `metadata` that an API server owns.
const SERVER_FIELDS: [&str; 8] = [
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "resourceVersion",
    "generation",
    "managedFields",
    "selfLink",
];
/// Annotation of kubectl with the whole manifest, which may have a Secret.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The objects of a user.
#[derive(Debug, Clone)]
pub struct ObjectStore {
    path: PathBuf,
}

/// The result of an apply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    pub outcome: Outcome,
    /// The object as it is now.
    pub object: StoredObject,
    /// The manifest as it was before.
    pub before: Option<Value>,
}

/// The result of an apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Created,
    Configured,
    Unchanged,
}

impl ObjectStore {
    /// The store in the directory `path`, which need not exist.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> ObjectStore {
        ObjectStore { path: path.into() }
    }

    /// The file that every change makes. Without it nothing was ever stored in this directory, or the file system with
    /// the store is not mounted.
    #[must_use]
    pub fn lock_file(&self) -> PathBuf {
        self.path.join(LOCK)
    }

    /// All objects.
    ///
    /// # Errors
    /// The directory cannot be read. Damaged files are no error: see [`Objects::damaged`].
    pub fn read(&self) -> Result<Objects, ObjectError> {
        self.read_kinds(|_| true)
    }

    /// The objects of the kinds that `wanted` chooses.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_kinds(&self, wanted: impl Fn(Kind) -> bool) -> Result<Objects, ObjectError> {
        let mut all = Objects::default();
        let namespaces = names(&self.path)?
            .into_iter()
            .filter(|name| !name.starts_with('.'));
        for namespace in namespaces.chain([CLUSTER.to_owned()]) {
            for kind in Kind::ALL {
                if !wanted(kind) || kind.is_namespaced() == (namespace == CLUSTER) {
                    continue;
                }
                for file in names(&self.path.join(&namespace).join(kind.directory()))? {
                    let Some(name) = file.strip_suffix(".yaml").filter(|name| !name.starts_with('.')) else {
                        continue;
                    };
                    match self.get(&Key::new(kind, &namespace, name)) {
                        Ok(object) => all.objects.push(object),
                        // It was deleted meanwhile.
                        Err(ObjectError::NotFound(_)) => {}
                        Err(error) => all.damaged.push(error),
                    }
                }
            }
        }
        all.objects.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(all)
    }

    /// The object of a key.
    ///
    /// # Errors
    /// There is none, or its file is damaged.
    pub fn get(&self, key: &Key) -> Result<StoredObject, ObjectError> {
        let path = self.file(key);
        let missing = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => ObjectError::NotFound(key.clone()),
            _ => ObjectError::io(&path)(error),
        };
        let damaged = |reason: &str| ObjectError::Damaged {
            path: path.clone(),
            reason: reason.to_owned(),
        };
        let file = File::open(&path).map_err(missing)?;
        let mode = file
            .metadata()
            .map_err(ObjectError::io(&path))?
            .permissions()
            .mode();
        let mut text = Vec::new();
        file.take(MANIFEST_LIMIT as u64 + 1)
            .read_to_end(&mut text)
            .map_err(ObjectError::io(&path))?;
        let text = String::from_utf8(text).map_err(|_| damaged("it is not UTF-8"))?;
        let mut object = StoredObject::parse(key.clone(), &path, &text)?;
        if mode & DELETING != 0 {
            mark(&mut object.object.value);
        }
        Ok(object)
    }

    /// Path of the file of an object, whether it exists or not.
    #[must_use]
    pub fn file(&self, key: &Key) -> PathBuf {
        self.path.join(key.file())
    }

    /// Creates or replaces the object of a checked manifest. Its UID, the time of its creation and its owners stay.
    ///
    /// # Errors
    /// The kind is not stored, the object is immutable or being deleted, or the store cannot be written.
    pub fn apply(&self, manifest: &Value) -> Result<Applied, ObjectError> {
        let _lock = self.lock()?;
        let applied = self.compare(manifest)?;
        if applied.outcome != Outcome::Unchanged {
            self.write(&applied.object)?;
        }
        Ok(applied)
    }

    /// The result that [`apply`](Self::apply) would have.
    ///
    /// # Errors
    /// See there.
    pub fn compare(&self, manifest: &Value) -> Result<Applied, ObjectError> {
        let kind = || ObjectError::Kind(manifest["kind"].as_str().unwrap_or_default().to_owned());
        let key = Key::of(manifest).ok_or_else(kind)?;
        let path = self.file(&key);
        let mut old = Value::Null;
        let before = match self.get(&key) {
            Ok(object) if object.is_deleting() => return Err(ObjectError::Deleting(key)),
            Ok(object) => {
                old = object.value()["metadata"].clone();
                Some(object)
            }
            Err(ObjectError::NotFound(_)) => None,
            // A file that a person broke is replaced.
            Err(ObjectError::Damaged { .. }) => {
                old = damaged::metadata(&path, &key);
                None
            }
            Err(error) => return Err(error),
        };
        let new = complete(manifest, &key, &old);
        // As it will be read: without null values, which a manifest may have.
        let text = text(&path, &new)?;
        if text.len() > MANIFEST_LIMIT {
            return Err(ObjectError::TooLarge(key));
        }
        let object = StoredObject::parse(key.clone(), &path, &text)?;
        let outcome = match &before {
            None => Outcome::Created,
            Some(before) if before.value() == object.value() => Outcome::Unchanged,
            Some(before)
                if before.value()["immutable"] == true && changes_data(before.value(), object.value()) =>
            {
                return Err(ObjectError::Immutable(key));
            }
            Some(_) => Outcome::Configured,
        };
        Ok(Applied {
            outcome,
            object,
            before: before.map(|before| before.object.value),
        })
    }

    /// Changes an object by `change`.
    ///
    /// # Errors
    /// There is no such object, the change makes it invalid, or the store cannot be written.
    pub fn edit(&self, key: &Key, change: impl FnOnce(&mut Value)) -> Result<StoredObject, ObjectError> {
        let _lock = self.lock()?;
        let mut value = self.get(key)?.object.value;
        change(&mut value);
        let path = self.file(key);
        let object = StoredObject::parse(key.clone(), &path, &text(&path, &value)?)?;
        self.write(&object)?;
        Ok(object)
    }

    /// Begins the deletion of an object: it cannot change any more, and VMs do not use it. Works on a full disk.
    ///
    /// # Errors
    /// There is no such object, or the store cannot be written.
    pub fn begin_deletion(&self, key: &Key) -> Result<StoredObject, ObjectError> {
        match self.edit(key, mark) {
            Err(error @ ObjectError::Io { .. }) => self.mark_file(key, true, error),
            done => done,
        }
    }

    /// Takes back that the deletion of an object has begun.
    ///
    /// # Errors
    /// There is no such object, or the store cannot be written.
    pub fn cancel_deletion(&self, key: &Key) -> Result<StoredObject, ObjectError> {
        let edited = self.edit(key, |object| {
            if let Some(metadata) = object["metadata"].as_object_mut() {
                metadata.remove("deletionTimestamp");
            }
        });
        match edited {
            Err(error @ ObjectError::Io { .. }) => self.mark_file(key, false, error),
            // The new file has no mark.
            done => done,
        }
    }

    /// Marks the file of an object as deleted, or no more, by its mode. Fails with `error` if that has no effect.
    fn mark_file(&self, key: &Key, deleting: bool, error: ObjectError) -> Result<StoredObject, ObjectError> {
        let _lock = self.lock()?;
        let path = self.file(key);
        let set = |file: File| {
            let mut permissions = file.metadata()?.permissions();
            let mode = permissions.mode();
            permissions.set_mode(if deleting {
                mode | DELETING
            } else {
                mode & !DELETING
            });
            file.set_permissions(permissions)?;
            file.sync_all()
        };
        File::open(&path).and_then(set).map_err(ObjectError::io(&path))?;
        match self.get(key)? {
            object if object.is_deleting() == deleting => Ok(object),
            _ => Err(error),
        }
    }

    /// Removes the file of an object, damaged or not.
    ///
    /// # Errors
    /// There is no such object, or the store cannot be written.
    pub fn remove(&self, key: &Key) -> Result<(), ObjectError> {
        let _lock = self.lock()?;
        let path = self.file(key);
        fs::remove_file(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ObjectError::NotFound(key.clone()),
            _ => ObjectError::io(&path)(error),
        })?;
        if let Some(directory) = path.parent() {
            sync_directory(directory)?;
            // They fail if there are other objects.
            let _ = fs::remove_dir(directory);
            let _ = directory.parent().map(fs::remove_dir);
        }
        Ok(())
    }

    /// Removes what a power cut has left of changes.
    ///
    /// # Errors
    /// The store cannot be written.
    pub fn remove_leftovers(&self) -> Result<(), ObjectError> {
        if !self.path.exists() {
            return Ok(());
        }
        let _lock = self.lock()?;
        for namespace in names(&self.path)? {
            for kind in names(&self.path.join(&namespace))? {
                let directory = self.path.join(&namespace).join(kind);
                for file in names(&directory)? {
                    if file.starts_with('.') && file.ends_with(NEW) {
                        let path = directory.join(file);
                        fs::remove_file(&path).map_err(ObjectError::io(&path))?;
                    }
                }
            }
        }
        Ok(())
    }

    fn write(&self, object: &StoredObject) -> Result<(), ObjectError> {
        let path = self.file(&object.key);
        let directory = path.parent().unwrap_or(&self.path);
        make_directory(directory)?;
        let new = directory.join(format!(".{}{NEW}", object.key.name));
        let text = text(&path, object.value())?;
        let _ = fs::remove_file(&new);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&new)
            .map_err(ObjectError::io(&new))?;
        file.write_all(text.as_bytes())
            .and_then(|()| file.sync_all())
            .and_then(|()| fs::rename(&new, &path))
            .map_err(|error| {
                // It would take space on a disk that is full.
                let _ = fs::remove_file(&new);
                ObjectError::io(&path)(error)
            })?;
        // The directories above may be new too.
        for directory in directory.ancestors().take(3) {
            sync_directory(directory)?;
        }
        Ok(())
    }

    fn lock(&self) -> Result<File, ObjectError> {
        make_directory(&self.path)?;
        let path = self.lock_file();
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(ObjectError::io(&path))?;
        flock(&lock, FlockOperation::LockExclusive).map_err(ObjectError::io(&path))?;
        Ok(lock)
    }
}

/// The manifest to store: what an API server owns is that of the `old` metadata, or new.
fn complete(manifest: &Value, key: &Key, old: &Value) -> Value {
    let mut object = manifest.clone();
    if let Some(object) = object.as_object_mut() {
        object.remove("status");
    }
    let mut metadata = match object["metadata"].take() {
        Value::Object(metadata) => metadata,
        _ => Map::new(),
    };
    for field in SERVER_FIELDS {
        metadata.remove(field);
    }
    if let Some(Value::Object(annotations)) = metadata.get_mut("annotations") {
        annotations.remove(LAST_APPLIED);
    }
    if key.kind.is_namespaced() {
        metadata.insert("namespace".to_owned(), json!(key.namespace));
    }
    let kept = |field: &str| old.get(field).filter(|old| !old.is_null()).cloned();
    let uid = kept("uid").unwrap_or_else(|| json!(uuid::Uuid::new_v4().to_string()));
    metadata.insert("uid".to_owned(), uid);
    let created = kept("creationTimestamp").unwrap_or_else(|| json!(now()));
    metadata.insert("creationTimestamp".to_owned(), created);
    if let Some(owners) = kept("ownerReferences") {
        metadata.entry("ownerReferences").or_insert(owners);
    }
    object["metadata"] = Value::Object(metadata);
    object
}

/// Marks a manifest as that of an object whose deletion has begun.
fn mark(object: &mut Value) {
    let metadata = &mut object["metadata"];
    if metadata.get("deletionTimestamp").is_none() {
        metadata["deletionTimestamp"] = json!(now());
    }
}

/// The time as an API server writes it.
fn now() -> String {
    let now = Timestamp::now();
    now.round(Unit::Second).unwrap_or(now).to_string()
}

/// True if the data of a Secret or ConfigMap differs.
fn changes_data(before: &Value, new: &Value) -> bool {
    ["data", "stringData", "binaryData", "immutable"]
        .iter()
        .any(|field| before.get(field) != new.get(field))
}

fn text(path: &Path, value: &Value) -> Result<String, ObjectError> {
    serde_saphyr::to_string(value).map_err(|error| ObjectError::Damaged {
        path: path.to_owned(),
        reason: error.to_string(),
    })
}

/// Makes a directory, and those above it, for the owner only.
fn make_directory(path: &Path) -> Result<(), ObjectError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(ObjectError::io(path))
}

fn sync_directory(path: &Path) -> Result<(), ObjectError> {
    File::open(path)
        .and_then(|directory| directory.sync_all())
        .map_err(ObjectError::io(path))
}

/// Names of the entries of a directory, sorted; none if it does not exist.
fn names(directory: &Path) -> Result<Vec<String>, ObjectError> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => return Ok(Vec::new()),
        other => other.map_err(ObjectError::io(directory))?,
    };
    let mut names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests;
