//! Reads a VirtualMachineInstance or VirtualMachine object and checks it against the schema.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};
use uuid::Uuid;

use super::claim::{claims, preallocated};
use super::metadata::{DEFAULT_NAMESPACE, Metadata};
use super::run_strategy;
use super::vmi::Vmi;
use crate::field::FieldError;
use crate::schema::{Diagnostics, VM_SPEC, VMI_SPEC, check};
use crate::types::Spec;

/// Path of the VMI's spec in a VirtualMachine.
pub(crate) const TEMPLATE_SPEC: &str = "spec.template.spec";

pub(crate) fn read_vmi(object: &Map<String, Value>) -> Result<Vmi, Vec<FieldError>> {
    let mut found = envelope(object, "", &VMI_SPEC);
    let spec = spec(object.get("spec"), "spec", &mut found);
    let metadata = Metadata::of(object.get("metadata"));
    metadata.check(&mut found.schema);
    let (name, namespace) = (metadata.name.clone(), metadata.namespace.clone());
    let vmi = build(found, name, namespace, metadata, spec, "spec")?;
    let status = object.get("status");
    Ok(Vmi {
        claims: claims(status),
        preallocated: preallocated(status),
        vsock_cid: status.and_then(|status| status.get("VSOCKCID")).cloned(),
        ..vmi
    })
}

pub(crate) fn read_vm(object: &Map<String, Value>) -> Result<Vmi, Vec<FieldError>> {
    let mut found = envelope(object, "", &VM_SPEC);
    let vm = object.get("spec").cloned().unwrap_or_default();
    let template = vm.get("template").cloned().unwrap_or_default();
    found.merge(check_template(&template));
    let metadata = Metadata::of(object.get("metadata"));
    metadata.check(&mut found.schema);
    run_strategy::add_warning(&vm, &mut found);
    of_template(found, &metadata, &template)
}

/// The VMI of a VirtualMachine with this metadata and this template, which instance type and preference have changed.
pub(crate) fn expanded(metadata: &Metadata, template: &Value) -> Result<Vmi, Vec<FieldError>> {
    of_template(check_template(template), metadata, template)
}

/// Checks the spec in a template. One that is no object is the caller's error.
pub(crate) fn check_template(template: &Value) -> Diagnostics {
    let mut found = Diagnostics::default();
    if template.is_object() {
        match template.get("spec") {
            Some(spec) => found.merge(check(spec, &VMI_SPEC, TEMPLATE_SPEC)),
            None => found.schema.push(FieldError::required(
                TEMPLATE_SPEC,
                format!("{TEMPLATE_SPEC} in body is required"),
            )),
        }
    }
    found
}

fn of_template(mut found: Diagnostics, vm: &Metadata, template: &Value) -> Result<Vmi, Vec<FieldError>> {
    let mut spec = spec(template.get("spec"), TEMPLATE_SPEC, &mut found);
    if spec.domain.firmware.uuid.is_none() {
        spec.domain.firmware.uuid = Some(vm_uuid(vm).to_string());
    }
    let (name, namespace) = (vm.name.clone(), vm.namespace.clone());
    let metadata = Metadata::of(template.get("metadata"));
    build(found, name, namespace, metadata, spec, TEMPLATE_SPEC)
}

/// The namespace of the UUIDs that KubeVirt derived from the names of VirtualMachines before it stored random ones.
const VM_UUIDS: Uuid = uuid::uuid!("6a1a24a1-4061-4607-8bf4-a3963d0c5895");

/// The system UUID of all instances of a VirtualMachine: in the default namespace KubeVirt's old one, elsewhere one that
/// no VirtualMachine of another namespace has.
fn vm_uuid(vm: &Metadata) -> Uuid {
    let name = match vm.namespace.as_str() {
        DEFAULT_NAMESPACE => vm.name.clone(),
        namespace => format!("{namespace}/{}", vm.name),
    };
    Uuid::new_v5(&VM_UUIDS, name.as_bytes())
}

/// Checks the object without the VMI spec, which is deeper in a VirtualMachine.
fn envelope(object: &Map<String, Value>, path: &str, spec: &crate::schema::FieldType) -> Diagnostics {
    let mut found = check(&Value::Object(object.clone()), &crate::schema::OBJECT, path);
    match object.get("spec") {
        Some(value) => found.merge(check(value, spec, "spec")),
        None => found
            .schema
            .push(FieldError::required("spec", "spec in body is required")),
    }
    found
}

/// Reads a spec that matches the schema; otherwise returns an empty one, and `found` has the errors.
fn spec(value: Option<&Value>, path: &str, found: &mut Diagnostics) -> Spec {
    let Some(value) = value.filter(|_| found.schema.is_empty()) else {
        return Spec::default();
    };
    serde_json::from_value(value.clone()).unwrap_or_else(|error| {
        found.schema.push(FieldError::invalid(path, error.to_string()));
        Spec::default()
    })
}

fn build(
    found: Diagnostics,
    name: String,
    namespace: String,
    metadata: Metadata,
    spec: Spec,
    path: &'static str,
) -> Result<Vmi, Vec<FieldError>> {
    if !found.schema.is_empty() {
        return Err(found.schema);
    }
    Ok(Vmi {
        name,
        namespace,
        uid: metadata.uid,
        labels: metadata.labels,
        annotations: metadata.annotations,
        spec,
        claims: BTreeMap::new(),
        preallocated: BTreeSet::new(),
        vsock_cid: None,
        document: None,
        path,
        unsupported: found.unsupported,
        warnings: found.warnings,
    })
}
