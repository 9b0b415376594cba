//! PersistentVolumeClaims, and the claims that DataVolumes describe.

use serde_json::{Map, Value};

use super::{ObjectKind, check_name, object, text, texts};
use crate::field::FieldError;
use crate::load::Metadata;
use crate::quantity::Quantity;
use crate::schema::Diagnostics;

/// A PersistentVolumeClaim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PersistentVolumeClaim {
    /// Name, namespace and labels.
    pub metadata: Metadata,
    /// `spec`
    pub spec: ClaimSpec,
}

/// The volume that a claim asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimSpec {
    /// `accessModes`, at least one. `ReadWriteOnce` if a DataVolume's `storage` gives none; CDI then takes those of the
    /// storage class's StorageProfile.
    pub access_modes: Vec<AccessMode>,
    /// `volumeMode`; `Filesystem` if not given. Without it a DataVolume's `storage` gets the StorageProfile's in CDI.
    pub volume_mode: VolumeMode,
    /// `storageClassName`; none stands for the default class.
    pub storage_class_name: Option<String>,
    /// `resources.requests.storage` in bytes. None only for a DataVolume's `storage` that copies a claim: the size of
    /// that claim's volume.
    pub size: Option<u64>,
    /// The claim in the same namespace whose data the volume starts with: `dataSource` or `dataSourceRef`.
    pub data_source: Option<String>,
}

/// `accessModes[]`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessMode {
    /// Read and written on one node.
    ReadWriteOnce,
    /// Read on many nodes.
    ReadOnlyMany,
    /// Read and written on many nodes.
    ReadWriteMany,
    /// Read and written by one pod.
    ReadWriteOncePod,
}

/// `volumeMode`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeMode {
    /// A filesystem; a VM's disk is the file `disk.img` in it.
    Filesystem,
    /// A block device, which is the VM's disk.
    Block,
}

/// The field that holds a claim's spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holder {
    /// A PersistentVolumeClaim.
    Claim,
    /// `pvc` of a DataVolume.
    Pvc,
    /// `storage` of a DataVolume; true if its source has a size.
    Storage(bool),
}

pub(super) fn read(object: &Map<String, Value>, metadata: Metadata, found: &mut Diagnostics) -> ObjectKind {
    let spec = super::object(object, "spec").cloned().unwrap_or_default();
    let spec = ClaimSpec::of(&spec, Holder::Claim, "spec", &mut found.schema);
    ObjectKind::PersistentVolumeClaim(PersistentVolumeClaim { metadata, spec })
}

impl AccessMode {
    /// The value of the field.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadWriteOnce => "ReadWriteOnce",
            Self::ReadOnlyMany => "ReadOnlyMany",
            Self::ReadWriteMany => "ReadWriteMany",
            Self::ReadWriteOncePod => "ReadWriteOncePod",
        }
    }

    /// The short form that kubectl prints.
    #[must_use]
    pub fn short_name(self) -> &'static str {
        match self {
            Self::ReadWriteOnce => "RWO",
            Self::ReadOnlyMany => "ROX",
            Self::ReadWriteMany => "RWX",
            Self::ReadWriteOncePod => "RWOP",
        }
    }
}

impl VolumeMode {
    /// The value of the field.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Filesystem => "Filesystem",
            Self::Block => "Block",
        }
    }
}

impl ClaimSpec {
    pub(super) fn of(
        spec: &Map<String, Value>,
        holder: Holder,
        path: &str,
        errors: &mut Vec<FieldError>,
    ) -> Self {
        let size = size(spec, holder, path, errors);
        let storage_class_name = text(spec, "storageClassName").map(str::to_owned);
        if let Some(name) = &storage_class_name {
            check_name(name, &format!("{path}.storageClassName"), errors);
        }
        Self {
            access_modes: access_modes(spec, holder, path, errors),
            volume_mode: volume_mode(spec, holder, path, errors),
            storage_class_name,
            size,
            data_source: data_source(spec, path, errors),
        }
    }
}

fn size(spec: &Map<String, Value>, holder: Holder, path: &str, errors: &mut Vec<FieldError>) -> Option<u64> {
    let name = match holder {
        Holder::Claim => None,
        Holder::Pvc => Some("PVC"),
        Holder::Storage(_) => Some("Storage"),
    };
    let field = format!("{path}.resources.requests.storage");
    let requests = object(spec, "resources").and_then(|resources| object(resources, "requests"));
    let Some(given) = requests.and_then(|requests| requests.get("storage")) else {
        match name {
            None => errors.push(FieldError::required(
                &field,
                format!("{field} in body is required"),
            )),
            Some(_) if holder == Holder::Storage(true) => {}
            Some(name) => errors.push(FieldError::invalid(field, format!("{name} size is missing"))),
        }
        return None;
    };
    let quantity = serde_json::from_value::<Quantity>(given.clone()).ok()?;
    match quantity.bytes() {
        Some(1..) => return quantity.bytes(),
        _ => match name {
            None => errors.push(FieldError::invalid(
                field,
                format!("\"{quantity}\": must be greater than zero"),
            )),
            Some(name) => {
                let text = format!("{name} size can't be equal or less than zero");
                errors.push(FieldError::invalid(field, text));
            }
        },
    }
    None
}

fn access_modes(
    spec: &Map<String, Value>,
    holder: Holder,
    path: &str,
    errors: &mut Vec<FieldError>,
) -> Vec<AccessMode> {
    let field = format!("{path}.accessModes");
    let given = texts(spec, "accessModes");
    let mut modes = Vec::new();
    for mode in &given {
        modes.push(match mode.as_str() {
            "ReadWriteOnce" => AccessMode::ReadWriteOnce,
            "ReadOnlyMany" => AccessMode::ReadOnlyMany,
            "ReadWriteMany" => AccessMode::ReadWriteMany,
            "ReadWriteOncePod" if holder == Holder::Claim => AccessMode::ReadWriteOncePod,
            other => {
                let pod = if holder == Holder::Claim { ", \"ReadWriteOncePod\"" } else { "" };
                let text = format!(
                    "\"{other}\": supported values: \"ReadOnlyMany\", \"ReadWriteMany\", \"ReadWriteOnce\"{pod}"
                );
                errors.push(FieldError::unsupported(&field, text));
                continue;
            }
        });
    }
    match (holder, given.len()) {
        (Holder::Storage(_), 0) => return vec![AccessMode::ReadWriteOnce],
        (_, 0) => errors.push(FieldError::required(field, "at least 1 access mode is required")),
        (Holder::Pvc, 2..) => errors.push(FieldError::invalid(field, "PVC multiple accessModes")),
        (_, 2..) if modes.contains(&AccessMode::ReadWriteOncePod) => {
            let text = "may not use ReadWriteOncePod with other access modes";
            errors.push(FieldError::invalid(field, text));
        }
        _ => {}
    }
    modes
}

fn volume_mode(
    spec: &Map<String, Value>,
    holder: Holder,
    path: &str,
    errors: &mut Vec<FieldError>,
) -> VolumeMode {
    match text(spec, "volumeMode") {
        None | Some("Filesystem") => VolumeMode::Filesystem,
        Some("Block") => VolumeMode::Block,
        Some("FromStorageProfile") if matches!(holder, Holder::Storage(_)) => VolumeMode::Filesystem,
        Some(other) => {
            let text = format!("\"{other}\": supported values: \"Block\", \"Filesystem\"");
            errors.push(FieldError::unsupported(format!("{path}.volumeMode"), text));
            VolumeMode::Filesystem
        }
    }
}

/// The claim of `dataSource` and `dataSourceRef`, which must agree.
fn data_source(spec: &Map<String, Value>, path: &str, errors: &mut Vec<FieldError>) -> Option<String> {
    let sources = ["dataSource", "dataSourceRef"].map(|field| {
        let source = object(spec, field)?;
        let path = format!("{path}.{field}");
        let kind = text(source, "kind").unwrap_or_default();
        if kind != "PersistentVolumeClaim" || text(source, "apiGroup").is_some() {
            let text = format!("\"{kind}\" cannot be copied; only a PersistentVolumeClaim can");
            errors.push(FieldError::unsupported(format!("{path}.kind"), text));
        }
        let name = text(source, "name").unwrap_or_default();
        check_name(name, &format!("{path}.name"), errors);
        Some(name.to_owned())
    });
    match sources {
        [Some(source), Some(other)] if source != other => {
            let text = "must match dataSourceRef";
            errors.push(FieldError::invalid(format!("{path}.dataSource"), text));
            None
        }
        [source, other] => source.or(other),
    }
}
