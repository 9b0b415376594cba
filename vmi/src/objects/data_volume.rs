//! DataVolumes.

use serde_json::{Map, Value};

use super::claim::{ClaimSpec, Holder};
use super::source::{HttpSource, RegistrySource};
use super::{ObjectKind, check_name, object, text};
use crate::field::FieldError;
use crate::load::Metadata;
use crate::schema::Diagnostics;

/// A DataVolume: a claim of the same name and labels, with the data of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataVolume {
    /// Name, namespace and labels; the claim has the same.
    pub metadata: Metadata,
    /// `source`, or the claim in `dataSource` or `dataSourceRef` of `pvc` or `storage`.
    pub source: DataVolumeSource,
    /// `pvc` or `storage`.
    pub claim: ClaimSpec,
    /// True if the claim is given as `storage`: its size is that of the disk, and CDI requests more for the filesystem
    /// (5.5 % by default). With `pvc` it is the size of the volume, and the disk is smaller.
    pub by_storage: bool,
}

/// `source` of a DataVolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataVolumeSource {
    /// An empty disk.
    Blank,
    /// A file on a web server.
    Http(HttpSource),
    /// A containerDisk in a registry.
    Registry(RegistrySource),
    /// A copy of another claim's volume.
    Pvc {
        /// Namespace of the claim.
        namespace: String,
        /// Name of the claim.
        name: String,
    },
}

const SOURCES: [&str; 10] = [
    "http", "s3", "gcs", "registry", "pvc", "upload", "blank", "imageio", "vddk", "snapshot",
];

pub(super) fn read(object: &Map<String, Value>, metadata: Metadata, found: &mut Diagnostics) -> ObjectKind {
    ObjectKind::DataVolume(DataVolume::of(object, metadata, "", &mut found.schema))
}

impl DataVolume {
    /// Reads a DataVolume at `path`, which ends with a dot or is empty.
    pub(super) fn of(
        data: &Map<String, Value>,
        metadata: Metadata,
        path: &str,
        errors: &mut Vec<FieldError>,
    ) -> Self {
        let path = format!("{path}spec");
        let empty = Map::new();
        let spec = object(data, "spec").unwrap_or(&empty);
        let source = object(spec, "source");
        let copies = source.is_some_and(|source| source.contains_key("pvc"));
        let by_storage = spec.contains_key("storage");
        let (field, given) = match (object(spec, "pvc"), object(spec, "storage")) {
            (Some(pvc), None) => ("pvc", pvc),
            (None, Some(storage)) => ("storage", storage),
            (None, None) => {
                errors.push(FieldError::invalid(&path, "Missing Data volume PVC or Storage"));
                ("pvc", &empty)
            }
            (Some(pvc), Some(_)) => {
                let text = "Duplicate storage definition, both target storage and target pvc defined";
                errors.push(FieldError::invalid(&path, text));
                ("pvc", pvc)
            }
        };
        let holder = if by_storage {
            Holder::Storage(copies)
        } else {
            Holder::Pvc
        };
        // The claim's own errors would only repeat that there is none.
        let mut faults = Vec::new();
        let claim = ClaimSpec::of(given, holder, &format!("{path}.{field}"), &mut faults);
        if by_storage || spec.contains_key("pvc") {
            errors.append(&mut faults);
        }
        check_content(spec, &path, errors);
        Self {
            source: DataVolumeSource::of(spec, &claim, &metadata, &path, errors),
            metadata,
            claim,
            by_storage,
        }
    }
}

fn check_content(spec: &Map<String, Value>, path: &str, errors: &mut Vec<FieldError>) {
    let field = format!("{path}.contentType");
    match text(spec, "contentType") {
        None | Some("kubevirt") => {}
        Some("archive") => errors.push(FieldError::unsupported(
            field,
            "archives are not unpacked; use an image of a disk",
        )),
        Some(_) => errors.push(FieldError::invalid(
            field,
            "ContentType not one of: kubevirt, archive",
        )),
    }
}

impl DataVolumeSource {
    fn of(
        spec: &Map<String, Value>,
        claim: &ClaimSpec,
        metadata: &Metadata,
        path: &str,
        errors: &mut Vec<FieldError>,
    ) -> Self {
        let field = format!("{path}.source");
        let mut fault = |text: &str| errors.push(FieldError::invalid(&field, text));
        let populated = claim.data_source.as_ref();
        let source = match (object(spec, "source"), populated) {
            (Some(_), Some(_)) => {
                fault("External population is incompatible with Source and SourceRef");
                return Self::Blank;
            }
            (None, Some(name)) => {
                return Self::Pvc {
                    namespace: metadata.namespace.clone(),
                    name: name.clone(),
                };
            }
            // The schema refuses it.
            (None, None) if spec.contains_key("sourceRef") => return Self::Blank,
            (None, None) => {
                fault("Data volume should have either Source or SourceRef, or be externally populated");
                return Self::Blank;
            }
            (Some(source), None) => source,
        };
        let given = SOURCES.iter().filter(|kind| source.contains_key(**kind));
        match given.count() {
            0 => fault("Missing Data volume source"),
            1 => {}
            _ => fault("Multiple Data volume sources"),
        }
        if let Some(http) = object(source, "http") {
            return Self::Http(HttpSource::of(http, &format!("{field}.http"), errors));
        }
        if let Some(registry) = object(source, "registry") {
            return Self::Registry(RegistrySource::of(registry, &format!("{field}.registry"), errors));
        }
        let Some(pvc) = object(source, "pvc") else {
            return Self::Blank;
        };
        let field = format!("{field}.pvc");
        let name = text(pvc, "name").unwrap_or_default();
        let namespace = text(pvc, "namespace").unwrap_or_default();
        if name.is_empty() || namespace.is_empty() {
            let text = format!("{field} source PVC is not valid");
            errors.push(FieldError::invalid(field, text));
        } else {
            check_name(name, &format!("{field}.name"), errors);
            if let Some(fault) = crate::names::label_fault(namespace) {
                let field = format!("{field}.namespace");
                let text = format!("{field} '{namespace}': {fault}");
                errors.push(FieldError::invalid(field, text));
            }
        }
        Self::Pvc {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }
}
