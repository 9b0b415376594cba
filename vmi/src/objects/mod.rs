//! The objects of a manifest around its VMs: what a VM needs to run without a cluster.
//!
//! Rules on values are those of the API server, of KubeVirt v1.9 and of CDI, with their texts. The path of an error is
//! that of the field in the manifest.

mod claim;
mod config;
mod data_volume;
mod instancetype;
mod keys;
mod source;
#[cfg(test)]
mod tests;
mod virtual_machine;

use std::fmt;

use serde_json::{Map, Value};

use crate::field::{FieldError, OneLine, Warning};
use crate::load::{Header, KUBEVIRT, KUBEVIRT_VERSIONS, LoadError, Metadata, Vmi, read_documents, read_vmi};
use crate::schema::{Diagnostics, FieldType, check};

pub use crate::load::RunStrategy;
pub use claim::{AccessMode, ClaimSpec, PersistentVolumeClaim, VolumeMode};
pub use config::{ConfigMap, Secret};
pub use data_volume::{DataVolume, DataVolumeSource};
pub use instancetype::{Instancetype, Preference};
pub use source::{Checksum, ChecksumAlgorithm, HttpSource, PullMethod, RegistrySource};
#[cfg(test)]
pub(crate) use tests::any_json;
pub use virtual_machine::{InferFromVolumeFailurePolicy, Matcher, VirtualMachine};

/// An object of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Name of its document in messages; none if the manifest has one document only.
    pub document: Option<String>,
    /// Warnings about ignored fields. Those of a VMI are [`warnings`](crate::warnings).
    pub warnings: Vec<Warning>,
    /// The object as the manifest has it, without null values.
    pub value: Value,
    /// The object itself.
    pub kind: ObjectKind,
}

/// The kind of an object, with its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    /// `v1`
    Secret(Secret),
    /// `v1`
    ConfigMap(ConfigMap),
    /// `v1`
    PersistentVolumeClaim(PersistentVolumeClaim),
    /// `cdi.kubevirt.io/v1beta1`
    DataVolume(DataVolume),
    /// VirtualMachineInstancetype or VirtualMachineClusterInstancetype of `instancetype.kubevirt.io/v1beta1`
    Instancetype(Box<Instancetype>),
    /// VirtualMachinePreference or VirtualMachineClusterPreference of `instancetype.kubevirt.io/v1beta1`
    Preference(Box<Preference>),
    /// `kubevirt.io/v1` and `v1alpha3`; [`expand`](crate::instancetype::expand) makes the VMI.
    VirtualMachine(Box<VirtualMachine>),
    /// `kubevirt.io/v1` and `v1alpha3`
    VirtualMachineInstance(Box<Vmi>),
    /// Any other object, which Husk does not use.
    Other(OtherObject),
}

/// An object that Husk does not use. It prints as `KIND NAME` on one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherObject {
    /// `apiVersion`, as given.
    pub api_version: String,
    /// `kind`, as given.
    pub kind: String,
    /// `metadata.namespace`, as given.
    pub namespace: String,
    /// `metadata.name`, as given.
    pub name: String,
}

impl fmt::Display for OtherObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", OneLine(&self.kind))?;
        if !matches!(self.namespace.as_str(), "" | "default") {
            write!(f, "{}/", OneLine(&self.namespace))?;
        }
        write!(f, "{}", OneLine(&self.name))
    }
}

impl ObjectKind {
    /// Name, namespace and labels; none for a VMI and for other objects.
    pub fn metadata(&self) -> Option<&Metadata> {
        match self {
            Self::Secret(secret) => Some(&secret.metadata),
            Self::ConfigMap(map) => Some(&map.metadata),
            Self::PersistentVolumeClaim(claim) => Some(&claim.metadata),
            Self::DataVolume(data) => Some(&data.metadata),
            Self::Instancetype(instancetype) => Some(&instancetype.metadata),
            Self::Preference(preference) => Some(&preference.metadata),
            Self::VirtualMachine(vm) => Some(&vm.metadata),
            Self::VirtualMachineInstance(_) | Self::Other(_) => None,
        }
    }
}

/// Reads all objects of a manifest, in its order. Syntax and limits are those of [`load`](crate::load). A manifest
/// without any object is no error, and neither are two objects of the same name.
///
/// # Errors
/// See [`LoadError`]; never [`LoadError::NoVm`].
pub fn read_objects(text: &str) -> Result<Vec<Object>, LoadError> {
    read_documents(text, |value, document| {
        let header = Header::of(value)?;
        let mut warnings = Vec::new();
        let kind = read(&header, document, &mut warnings)?;
        Ok(Object {
            document: document.clone(),
            warnings,
            value: Value::Object(header.without_nulls()),
            kind,
        })
    })
}

/// Reads a checked object; `found` has no errors yet, but may get some.
type Reader = fn(&Map<String, Value>, Metadata, &mut Diagnostics) -> ObjectKind;

/// Maximum number of errors reported for one object.
const MOST: usize = 100;
const CDI: &str = "cdi.kubevirt.io";
const INSTANCETYPE: &str = "instancetype.kubevirt.io";

fn read(
    header: &Header,
    document: &Option<String>,
    warnings: &mut Vec<Warning>,
) -> Result<ObjectKind, Vec<FieldError>> {
    use crate::schema;
    let (group, versions, scope, schema, reader): (_, _, _, &FieldType, Reader) = match header.kind {
        "Secret" => ("", CORE, NAMESPACED, &schema::SECRET, config::read_secret),
        "ConfigMap" => ("", CORE, NAMESPACED, &schema::CONFIG_MAP, config::read_config_map),
        "PersistentVolumeClaim" => (
            "",
            CORE,
            NAMESPACED,
            &schema::PERSISTENT_VOLUME_CLAIM,
            claim::read,
        ),
        "DataVolume" => (CDI, BETA, NAMESPACED, &schema::DATA_VOLUME, data_volume::read),
        "VirtualMachineInstancetype" => (
            INSTANCETYPE,
            BETA,
            NAMESPACED,
            &schema::INSTANCETYPE,
            instancetype::read_instancetype,
        ),
        "VirtualMachineClusterInstancetype" => (
            INSTANCETYPE,
            BETA,
            CLUSTER,
            &schema::INSTANCETYPE,
            instancetype::read_instancetype,
        ),
        "VirtualMachinePreference" => (
            INSTANCETYPE,
            BETA,
            NAMESPACED,
            &schema::PREFERENCE,
            instancetype::read_preference,
        ),
        "VirtualMachineClusterPreference" => (
            INSTANCETYPE,
            BETA,
            CLUSTER,
            &schema::PREFERENCE,
            instancetype::read_preference,
        ),
        "VirtualMachine" => (
            KUBEVIRT,
            KUBEVIRT_VERSIONS,
            NAMESPACED,
            &schema::OBJECT,
            virtual_machine::read,
        ),
        "VirtualMachineInstance" if header.is_of(KUBEVIRT, KUBEVIRT_VERSIONS)? => {
            let vmi = read_vmi(&header.without_nulls())?;
            let document = document.clone();
            return Ok(ObjectKind::VirtualMachineInstance(Box::new(Vmi {
                document,
                ..vmi
            })));
        }
        _ => return Ok(other(header)),
    };
    if !header.is_of(group, versions)? {
        return Ok(other(header));
    }
    let object = header.without_nulls();
    let mut found = check(&Value::Object(object.clone()), schema, "");
    let mut metadata = Metadata::of(object.get("metadata"));
    metadata.check(&mut found.schema);
    if scope == CLUSTER {
        metadata.namespace.clear();
    }
    let mut kind = ObjectKind::Other(OtherObject::of(header));
    if found.schema.is_empty() {
        kind = reader(&object, metadata, &mut found);
    }
    found.schema.append(&mut found.unsupported);
    if !found.schema.is_empty() {
        return Err(bounded(found.schema));
    }
    if let ObjectKind::VirtualMachine(vm) = &mut kind {
        vm.document.clone_from(document);
    }
    *warnings = found.warnings;
    Ok(kind)
}

const CORE: &[&str] = &["v1"];
const BETA: &[&str] = &["v1beta1"];
const NAMESPACED: bool = false;
const CLUSTER: bool = true;

/// Keeps a bounded number of errors.
fn bounded(mut errors: Vec<FieldError>) -> Vec<FieldError> {
    // The schema's check has one more: the number of those that it does not list.
    if errors.len() > MOST + 1 {
        let text = format!("and {} more validation errors", errors.len() - MOST);
        errors.truncate(MOST);
        errors.push(FieldError::invalid("", text));
    }
    errors
}

fn other(header: &Header) -> ObjectKind {
    ObjectKind::Other(OtherObject::of(header))
}

impl OtherObject {
    fn of(header: &Header) -> Self {
        Self {
            api_version: header.api_version.to_owned(),
            kind: header.kind.to_owned(),
            namespace: header.metadata("namespace").to_owned(),
            name: header.metadata("name").to_owned(),
        }
    }
}

/// The text of a field, unless it is absent or empty.
fn text<'a>(object: &'a Map<String, Value>, field: &str) -> Option<&'a str> {
    let text = object.get(field).and_then(Value::as_str);
    text.filter(|text| !text.is_empty())
}

/// The object of a field.
fn object<'a>(object: &'a Map<String, Value>, field: &str) -> Option<&'a Map<String, Value>> {
    object.get(field).and_then(Value::as_object)
}

/// The texts of a list.
fn texts(object: &Map<String, Value>, field: &str) -> Vec<String> {
    let list = object.get(field).and_then(Value::as_array).into_iter().flatten();
    list.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The name of another object, if given; it must be a DNS-1123 subdomain.
fn reference(
    map: &Map<String, Value>,
    field: &str,
    path: &str,
    errors: &mut Vec<FieldError>,
) -> Option<String> {
    let name = text(map, field)?;
    check_name(name, &format!("{path}.{field}"), errors);
    Some(name.to_owned())
}

fn check_name(name: &str, path: &str, errors: &mut Vec<FieldError>) {
    if let Some(fault) = crate::names::subdomain_fault(name) {
        errors.push(FieldError::invalid(path, format!("{path} '{name}': {fault}")));
    }
}
