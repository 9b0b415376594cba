//! From the text of a manifest to the VMIs in it.

mod document;
mod object;
mod yaml;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::field::{FieldError, Note, OneLine};
use crate::types::Spec;
use document::Document;
use object::{read_vm, read_vmi};

/// The largest manifest that is read, in bytes.
pub const MANIFEST_LIMIT: usize = 1 << 20;

/// A VirtualMachineInstance, or the one a VirtualMachine would make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmi {
    /// Its name, a DNS-1123 subdomain.
    pub name: String,
    /// Its namespace, a DNS-1123 label.
    pub namespace: String,
    /// Its UID, if a cluster gave it one.
    pub uid: Option<String>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// What it asks for.
    pub spec: Spec,
    /// What tells its document apart from the manifest's others, for people; none for the only one.
    pub document: Option<String>,
    /// Where `spec` stands in the document: `spec` or `spec.template.spec`.
    pub(crate) path: &'static str,
    /// Valid fields that are refused, found while reading.
    pub(crate) unsupported: Vec<FieldError>,
    /// Valid fields that are left out, found while reading.
    pub(crate) notes: Vec<Note>,
}

impl Vmi {
    /// The path of a field below `spec`, as the document has it.
    pub(crate) fn at(&self, field: &str) -> String {
        format!("{}.{field}", self.path)
    }

    /// The path of a field of its metadata, as the document has it.
    pub(crate) fn metadata_at(&self, field: &str) -> String {
        format!(
            "{}metadata.{field}",
            self.path.strip_suffix("spec").unwrap_or_default()
        )
    }

    /// Whether it is on the pod network: by name, or because it names no network at all.
    pub(crate) fn has_pod_network(&self) -> bool {
        let devices = &self.spec.domain.devices;
        if self.spec.networks.is_empty() {
            return devices.interfaces.is_empty() && devices.autoattach_pod_interface.unwrap_or(true);
        }
        self.spec.networks.iter().any(|network| network.pod.is_some())
    }
}

/// A document of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// A VM to run.
    Vmi(Box<Vmi>),
    /// Anything else; it is for a cluster and is ignored.
    Other {
        /// `apiVersion`, as given.
        api_version: String,
        /// `kind`, as given.
        kind: String,
        /// `metadata.name`, or nothing.
        name: String,
    },
}

/// A document with wrong fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadDocument {
    /// As [`Vmi::document`].
    pub document: Option<String>,
    /// What is wrong, at least one fault.
    pub errors: Vec<FieldError>,
}

/// Why a manifest cannot be used. Each prints on one line, but for [`LoadError::Invalid`]: one line per field.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It is too large to be a manifest.
    #[error("the manifest is larger than {} MiB, which is the limit: split it into several files", MANIFEST_LIMIT >> 20)]
    TooLarge,
    /// It is not YAML.
    #[error("line {line}, column {column}: {message}")]
    Syntax {
        /// Line, from 1; 0 if unknown.
        line: u64,
        /// Column, from 1; 0 if unknown.
        column: u64,
        /// What is wrong there.
        message: String,
    },
    /// It has no VM in it.
    #[error("no VirtualMachineInstance or VirtualMachine in the manifest{}", found(.0))]
    NoVm(Vec<String>),
    /// Fields are wrong.
    #[error("{}", lines(.0))]
    Invalid(Vec<BadDocument>),
}

fn found(kinds: &[String]) -> String {
    if kinds.is_empty() {
        String::new()
    } else {
        format!(" (found {})", OneLine(&kinds.join(", ")))
    }
}

fn lines(documents: &[BadDocument]) -> String {
    let lines = documents.iter().flat_map(|bad| {
        let place = bad.document.as_ref().map(|name| format!("{name}: "));
        let place = place.unwrap_or_default();
        bad.errors.iter().map(move |error| format!("{place}{error}"))
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Reads a manifest: YAML or JSON, any number of documents, `List`s taken apart. JSON objects need
/// no `---` between them.
///
/// The fields are checked against KubeVirt's schema, and all faults are reported at once. What a valid field means,
/// and whether it is supported, is decided by [`validate`](crate::validate).
///
/// # Errors
/// See [`LoadError`].
pub fn load(text: &str) -> Result<Vec<Loaded>, LoadError> {
    if text.len() > MANIFEST_LIMIT {
        return Err(LoadError::TooLarge);
    }
    let documents = document::expand(yaml::parse(text)?);
    let mut loaded = Vec::new();
    let mut errors = Vec::new();
    for (Document { value, .. }, document) in documents.iter().zip(document::names(&documents)) {
        match read(value, &document) {
            Ok(document) => loaded.push(document),
            Err(faults) => errors.push(BadDocument {
                document,
                errors: faults,
            }),
        }
    }
    if !errors.is_empty() {
        return Err(LoadError::Invalid(errors));
    }
    if !loaded.iter().any(|document| matches!(document, Loaded::Vmi(_))) {
        let kinds = loaded.into_iter().map(|document| match document {
            Loaded::Other { kind, .. } => kind,
            Loaded::Vmi(_) => String::new(),
        });
        return Err(LoadError::NoVm(kinds.collect()));
    }
    Ok(loaded)
}

fn read(value: &Value, document: &Option<String>) -> Result<Loaded, Vec<FieldError>> {
    let Value::Object(object) = value else {
        return Err(vec![FieldError::invalid(
            "kind",
            "the document is not an object with apiVersion, kind and spec",
        )]);
    };
    let text = |name: &str| {
        object
            .get(name)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    if kind.is_empty() {
        return Err(vec![FieldError::required("kind", "kind in body is required")]);
    }
    let is_vm = kind == "VirtualMachine";
    let ours = is_vm || kind == "VirtualMachineInstance";
    if !ours || !(api_version.is_empty() || api_version.starts_with("kubevirt.io/")) {
        let name = object
            .get("metadata")
            .and_then(|m| m.get("name"))
            .and_then(Value::as_str)
            .unwrap_or_default();
        return Ok(Loaded::Other {
            api_version,
            kind,
            name: name.to_owned(),
        });
    }
    if !matches!(api_version.as_str(), "kubevirt.io/v1" | "kubevirt.io/v1alpha3") {
        let message = format!("'{api_version}' is not known; kubevirt.io/v1 and kubevirt.io/v1alpha3 are");
        return Err(vec![FieldError::unsupported("apiVersion", message)]);
    }
    let mut object = object.clone();
    strip_nulls(&mut object);
    if is_vm {
        read_vm(&object)
    } else {
        read_vmi(&object)
    }
    .map(|vmi| {
        let document = document.clone();
        Loaded::Vmi(Box::new(Vmi { document, ..vmi }))
    })
}

/// Drops what is null, which is the same as absent.
fn strip_nulls(object: &mut Map<String, Value>) {
    object.retain(|_, value| !value.is_null());
    for value in object.values_mut() {
        strip_nulls_below(value);
    }
}

fn strip_nulls_below(value: &mut Value) {
    match value {
        Value::Object(object) => strip_nulls(object),
        Value::Array(items) => items.iter_mut().for_each(strip_nulls_below),
        _ => {}
    }
}
