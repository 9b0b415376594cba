//! Loads the VMIs of a manifest.

mod claim;
mod document;
mod error;
mod object;
mod vmi;
mod yaml;

use serde_json::{Map, Value};

use crate::field::FieldError;
use document::Document;
use object::{read_vm, read_vmi};

pub use claim::ClaimSize;
pub use error::{InvalidDocument, LoadError, MANIFEST_LIMIT};
pub use vmi::Vmi;

/// A document of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Loaded {
    /// A VM to run.
    Vmi(Box<Vmi>),
    /// Any other object, which is ignored.
    Other {
        /// `apiVersion`, as given.
        api_version: String,
        /// `kind`, as given.
        kind: String,
        /// `metadata.name`, or nothing.
        name: String,
    },
}

/// Reads a manifest in YAML or JSON with any number of documents; `List`s are expanded. JSON objects need no `---`
/// between them.
///
/// Checks the fields against KubeVirt's schema and reports all errors at once. Their values and their support are checked
/// by [`validate`](crate::validate).
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
            Err(faults) => errors.push(InvalidDocument {
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
        let message = format!("'{api_version}' is not supported; use kubevirt.io/v1 or kubevirt.io/v1alpha3");
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

/// Removes null values, which mean the same as absent fields.
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
