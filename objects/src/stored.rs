//! An object of the store, and all of them.

use std::path::{Path, PathBuf};

use husk_vmi::LoadError;
use husk_vmi::objects::{Object, ObjectKind, read_objects};
use jiff::Timestamp;
use serde_json::Value;

use crate::error::ObjectError;
use crate::key::Key;

/// An object of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredObject {
    pub key: Key,
    /// The checked object; its `value` is the whole manifest.
    pub object: Object,
}

/// The objects of the store at one moment.
#[derive(Debug, Default)]
pub struct Objects {
    /// Sorted by key.
    pub objects: Vec<StoredObject>,
    /// The files that could not be read.
    pub damaged: Vec<ObjectError>,
}

impl StoredObject {
    /// Reads the file at `path`, which must hold the object `key`.
    pub(crate) fn parse(key: Key, path: &Path, text: &str) -> Result<StoredObject, ObjectError> {
        let damaged = |reason: String| ObjectError::Damaged {
            path: PathBuf::from(path),
            reason,
        };
        let mut objects = read_objects(text).map_err(|error| damaged(one_line(&error)))?;
        let (Some(object), true) = (objects.pop(), objects.is_empty()) else {
            return Err(damaged("it must have exactly one object".to_owned()));
        };
        match Key::of(&object.value) {
            Some(found) if found == key => Ok(StoredObject { key, object }),
            Some(found) => Err(damaged(format!("it is {found} and not {key}"))),
            None => Err(damaged(format!("it is not {key}"))),
        }
    }

    /// The whole manifest.
    #[must_use]
    pub fn value(&self) -> &Value {
        &self.object.value
    }

    /// `metadata.uid`; empty if the file was written by hand.
    #[must_use]
    pub fn uid(&self) -> &str {
        self.metadata("uid").unwrap_or_default()
    }

    /// `metadata.creationTimestamp`
    #[must_use]
    pub fn created(&self) -> Option<Timestamp> {
        self.metadata("creationTimestamp")?.parse().ok()
    }

    /// True if its deletion has begun.
    #[must_use]
    pub fn is_deleting(&self) -> bool {
        self.metadata("deletionTimestamp").is_some()
    }

    /// True if it belongs to `owner`, and goes with it. A copy of the owner's file has the same UID, but another name.
    #[must_use]
    pub fn is_owned_by(&self, owner: &StoredObject) -> bool {
        let uid = owner.uid();
        !uid.is_empty()
            && self
                .owners()
                .any(|reference| reference["uid"] == uid && is_of(reference, &owner.key))
    }

    /// True if an owner of it has the kind and the name of `key`.
    #[must_use]
    pub fn names_owner(&self, key: &Key) -> bool {
        self.owners().any(|reference| is_of(reference, key))
    }

    fn owners(&self) -> impl Iterator<Item = &Value> {
        let owners = self.value().pointer("/metadata/ownerReferences");
        owners.and_then(Value::as_array).into_iter().flatten()
    }

    fn metadata(&self, field: &str) -> Option<&str> {
        self.value().get("metadata")?.get(field)?.as_str()
    }
}

impl Objects {
    /// The object of a key.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&StoredObject> {
        self.objects.iter().find(|object| object.key == *key)
    }

    /// The result of `find` for the object of a key.
    #[must_use]
    pub fn find<T>(&self, key: &Key, find: impl FnOnce(&ObjectKind) -> Option<&T>) -> Option<&T> {
        find(&self.get(key)?.object.kind)
    }
}

/// True if an entry of `ownerReferences` has the kind and the name of `key`.
fn is_of(reference: &Value, key: &Key) -> bool {
    reference["kind"] == key.kind.name() && reference["name"] == key.name.as_str()
}

/// An error of a manifest in one line, without its position.
fn one_line(error: &LoadError) -> String {
    match error {
        LoadError::Invalid(documents) => {
            let errors = documents.iter().flat_map(|document| &document.errors);
            let errors: Vec<String> = errors.map(ToString::to_string).collect();
            errors.join("; ")
        }
        error => error.to_string().replace('\n', "; "),
    }
}
