//! Loads the VMIs of a manifest.

mod claim;
mod document;
mod error;
mod header;
mod json;
mod metadata;
mod object;
mod run_strategy;
mod vmi;
mod yaml;

use serde_json::Value;

use crate::field::FieldError;
use document::Document;

pub use claim::ClaimSize;
pub use error::{InvalidDocument, LoadError, MANIFEST_LIMIT};
pub(crate) use header::Header;
pub use metadata::Metadata;
use object::read_vm;
pub(crate) use object::{TEMPLATE_SPEC, check_template, expanded, read_vmi};
pub use run_strategy::RunStrategy;
pub use vmi::Vmi;

/// API group of VirtualMachines and VirtualMachineInstances, and its versions.
pub(crate) const KUBEVIRT: &str = "kubevirt.io";
pub(crate) const KUBEVIRT_VERSIONS: &[&str] = &["v1", "v1alpha3"];

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
    let loaded = read_documents(text, read)?;
    if !loaded.iter().any(|document| matches!(document, Loaded::Vmi(_))) {
        let kinds = loaded.into_iter().map(|document| match document {
            Loaded::Other { kind, .. } => kind,
            Loaded::Vmi(_) => String::new(),
        });
        return Err(LoadError::NoVm(kinds.collect()));
    }
    Ok(loaded)
}

/// Reads each document of a manifest, and reports the errors of all. `read` gets the document and its name in messages.
pub(crate) fn read_documents<T>(
    text: &str,
    read: impl Fn(&Value, &Option<String>) -> Result<T, Vec<FieldError>>,
) -> Result<Vec<T>, LoadError> {
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
    if errors.is_empty() {
        Ok(loaded)
    } else {
        Err(LoadError::Invalid(errors))
    }
}

fn read(value: &Value, document: &Option<String>) -> Result<Loaded, Vec<FieldError>> {
    let header = Header::of(value)?;
    let read = match header.kind {
        "VirtualMachine" => read_vm,
        "VirtualMachineInstance" => read_vmi,
        _ => return Ok(other(&header)),
    };
    if !header.is_of(KUBEVIRT, KUBEVIRT_VERSIONS)? {
        return Ok(other(&header));
    }
    let vmi = read(&header.without_nulls())?;
    let document = document.clone();
    Ok(Loaded::Vmi(Box::new(Vmi { document, ..vmi })))
}

fn other(header: &Header) -> Loaded {
    Loaded::Other {
        api_version: header.api_version.to_owned(),
        kind: header.kind.to_owned(),
        name: header.metadata("name").to_owned(),
    }
}
