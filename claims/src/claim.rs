//! A claim, and its file.

use std::collections::BTreeMap;

use husk_vmi::Metadata;
use husk_vmi::objects::{AccessMode, ClaimSpec, ObjectKind, PersistentVolumeClaim, VolumeMode, read_objects};
use serde_json::{Value, json};

/// A claim to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewClaim {
    /// A DNS-1123 label.
    pub namespace: String,
    /// A DNS-1123 subdomain.
    pub name: String,
    /// In bytes; rounded up to whole MiB.
    pub size: u64,
    pub access_modes: Vec<AccessMode>,
    pub volume_mode: VolumeMode,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
}

/// A claim of the store, with the state of its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub object: PersistentVolumeClaim,
    /// Size of the volume, in bytes.
    pub size: u64,
    /// Allocated bytes.
    pub allocated: u64,
    /// A VM has the volume open.
    pub in_use: bool,
}

impl Claim {
    /// `NAME`, or `NAMESPACE/NAME` outside the namespace `default`.
    #[must_use]
    pub fn name(&self) -> String {
        name(&self.object.metadata.namespace, &self.object.metadata.name)
    }
}

/// A name as commands take it.
pub(crate) fn name(namespace: &str, name: &str) -> String {
    match namespace {
        "default" => name.to_owned(),
        _ => format!("{namespace}/{name}"),
    }
}

impl NewClaim {
    /// An empty volume that can be written on one machine.
    #[must_use]
    pub fn new(namespace: &str, name: &str, size: u64) -> NewClaim {
        NewClaim {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            size,
            access_modes: vec![AccessMode::ReadWriteOnce],
            volume_mode: VolumeMode::Filesystem,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
        }
    }

    /// The claim that a manifest describes. `size` is used if the manifest has none.
    #[must_use]
    pub fn of(metadata: &Metadata, spec: &ClaimSpec, size: u64) -> NewClaim {
        NewClaim {
            access_modes: spec.access_modes.clone(),
            volume_mode: spec.volume_mode,
            labels: metadata.labels.clone(),
            annotations: metadata.annotations.clone(),
            ..NewClaim::new(&metadata.namespace, &metadata.name, spec.size.unwrap_or(size))
        }
    }

    /// The claim as a manifest in YAML.
    pub(crate) fn manifest(&self) -> Result<String, String> {
        let modes: Vec<_> = self.access_modes.iter().map(|mode| mode.name()).collect();
        let mut metadata = json!({"name": self.name, "namespace": self.namespace});
        for (field, map) in [("labels", &self.labels), ("annotations", &self.annotations)] {
            if !map.is_empty() {
                metadata[field] = json!(map);
            }
        }
        let object = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata,
            "spec": {
                "accessModes": modes,
                "volumeMode": self.volume_mode.name(),
                "resources": {"requests": {"storage": self.size.to_string()}},
            },
        });
        serde_saphyr::to_string(&object).map_err(|error| error.to_string())
    }
}

/// Reads the file of the claim `name`.
pub(crate) fn parse(text: &str, namespace: &str, name: &str) -> Result<PersistentVolumeClaim, String> {
    let objects = read_objects(text).map_err(|error| error.to_string().replace('\n', "; "))?;
    let claim = objects.into_iter().find_map(|object| match object.kind {
        ObjectKind::PersistentVolumeClaim(claim) => Some(claim),
        _ => None,
    });
    let claim = claim.ok_or("it has no PersistentVolumeClaim")?;
    match claim.metadata.namespace == namespace && claim.metadata.name == name {
        true => Ok(claim),
        false => Err(format!(
            "it is the claim {}/{} and not {namespace}/{name}",
            claim.metadata.namespace, claim.metadata.name
        )),
    }
}

/// The manifest of a claim that has grown: all other fields stay as they are.
pub(crate) fn grown(text: &str, size: u64) -> Result<String, String> {
    edited(text, |object| {
        let requested = object.pointer_mut("/spec/resources/requests/storage");
        *requested.ok_or("it has no spec.resources.requests.storage")? = json!(size.to_string());
        Ok(())
    })
}

/// The manifest of a claim with other labels and annotations.
pub(crate) fn relabelled(
    text: &str,
    labels: &BTreeMap<String, String>,
    annotations: &BTreeMap<String, String>,
) -> Result<String, String> {
    edited(text, |object| {
        let metadata = object.get_mut("metadata").and_then(Value::as_object_mut);
        let metadata = metadata.ok_or("it has no metadata")?;
        for (field, map) in [("labels", labels), ("annotations", annotations)] {
            metadata.remove(field);
            if !map.is_empty() {
                metadata.insert(field.to_owned(), json!(map));
            }
        }
        Ok(())
    })
}

fn edited(text: &str, edit: impl FnOnce(&mut Value) -> Result<(), String>) -> Result<String, String> {
    let mut object: Value = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    edit(&mut object)?;
    serde_saphyr::to_string(&object).map_err(|error| error.to_string())
}
