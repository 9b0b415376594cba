//! Reads a VirtualMachineInstance or VirtualMachine object and checks it against the schema.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::claim::claims;
use super::vmi::Vmi;
use crate::field::{FieldError, Note};
use crate::schema::{Findings, VM_SPEC, VMI_SPEC, check};
use crate::types::Spec;

pub(super) fn read_vmi(object: &Map<String, Value>) -> Result<Vmi, Vec<FieldError>> {
    let mut found = envelope(object, "", &VMI_SPEC);
    let spec = spec(object.get("spec"), "spec", &mut found);
    let metadata = Metadata::of(object.get("metadata"));
    let (name, namespace) = identity(&metadata, &mut found);
    let vmi = build(found, name, namespace, metadata, spec, "spec")?;
    let claims = claims(object.get("status"));
    Ok(Vmi { claims, ..vmi })
}

pub(super) fn read_vm(object: &Map<String, Value>) -> Result<Vmi, Vec<FieldError>> {
    const PATH: &str = "spec.template.spec";
    let mut found = envelope(object, "", &VM_SPEC);
    let vm = object.get("spec").cloned().unwrap_or_default();
    let template = vm.get("template").cloned().unwrap_or_default();
    if template.is_object() {
        match template.get("spec") {
            Some(spec) => found.merge(check(spec, &VMI_SPEC, PATH)),
            None => found
                .schema
                .push(FieldError::required(PATH, format!("{PATH} in body is required"))),
        }
    }
    let mut spec = spec(template.get("spec"), PATH, &mut found);
    let metadata = Metadata::of(object.get("metadata"));
    let (name, namespace) = identity(&metadata, &mut found);
    run_strategy(&vm, &mut found);
    // All instances of a VirtualMachine have the same system UUID, which depends on its name only.
    if spec.domain.firmware.uuid.is_none() {
        spec.domain.firmware.uuid = Some(uuid::Uuid::new_v5(&VM_UUIDS, name.as_bytes()).to_string());
    }
    build(
        found,
        name,
        namespace,
        Metadata::of(template.get("metadata")),
        spec,
        PATH,
    )
}

/// The namespace of the UUIDs that KubeVirt derives from the names of VirtualMachines.
const VM_UUIDS: uuid::Uuid = uuid::uuid!("6a1a24a1-4061-4607-8bf4-a3963d0c5895");

fn run_strategy(vm: &Value, found: &mut Findings) {
    let running = vm.get("running").and_then(Value::as_bool);
    let strategy = vm.get("runStrategy").and_then(Value::as_str);
    const STARTED: &str = "a cluster would leave this VM stopped; Husk starts it";
    const ENDED: &str = "a cluster would restart this VM after its end; Husk does not";
    match (running, strategy) {
        (Some(_), Some(_)) => {
            let text = "Running and RunStrategy are mutually exclusive";
            found.schema.push(FieldError::invalid("spec.running", text));
        }
        (None, None) => {
            let text = "One of Running or RunStrategy must be specified";
            found.schema.push(FieldError::required("spec.running", text));
        }
        (Some(true), None) => found.notes.push(Note::new("spec.running", ENDED)),
        (None, Some("Always" | "RerunOnFailure")) => found.notes.push(Note::new("spec.runStrategy", ENDED)),
        (None, Some("Once" | "Manual")) => {}
        (Some(false), None) => found.notes.push(Note::new("spec.running", STARTED)),
        (None, Some("Halted")) => found.notes.push(Note::new("spec.runStrategy", STARTED)),
        (None, Some(other)) => {
            let text = format!("Invalid RunStrategy ({other})");
            found.schema.push(FieldError::invalid("spec.runStrategy", text));
        }
    }
}

/// Checks the object without the VMI spec, which is deeper in a VirtualMachine.
fn envelope(object: &Map<String, Value>, path: &str, spec: &crate::schema::FieldType) -> Findings {
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
fn spec(value: Option<&Value>, path: &str, found: &mut Findings) -> Spec {
    let Some(value) = value.filter(|_| found.schema.is_empty()) else {
        return Spec::default();
    };
    serde_json::from_value(value.clone()).unwrap_or_else(|error| {
        found.schema.push(FieldError::invalid(path, error.to_string()));
        Spec::default()
    })
}

/// The metadata that Husk uses.
#[derive(Debug, Default)]
struct Metadata {
    name: String,
    namespace: Option<String>,
    uid: Option<String>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

impl Metadata {
    fn of(value: Option<&Value>) -> Self {
        let text = |name| {
            value
                .and_then(|v| v.get(name))
                .and_then(Value::as_str)
                .map(str::to_owned)
        };
        let map = |name| {
            let map = value.and_then(|v| v.get(name)).and_then(Value::as_object);
            let texts = map.into_iter().flatten();
            texts
                .filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned())))
                .collect()
        };
        Self {
            name: text("name").unwrap_or_default(),
            namespace: text("namespace"),
            uid: text("uid").filter(|uid| !uid.is_empty()),
            labels: map("labels"),
            annotations: map("annotations"),
        }
    }
}

fn identity(metadata: &Metadata, found: &mut Findings) -> (String, String) {
    let name = metadata.name.clone();
    let namespace = metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
    if name.is_empty() {
        found.schema.push(FieldError::required(
            "metadata.name",
            "metadata.name in body is required",
        ));
    } else if let Some(fault) = crate::names::subdomain_fault(&name) {
        found.schema.push(FieldError::invalid(
            "metadata.name",
            format!("metadata.name '{name}': {fault}"),
        ));
    }
    if let Some(fault) = crate::names::label_fault(&namespace) {
        let text = format!("metadata.namespace '{namespace}': {fault}");
        found.schema.push(FieldError::invalid("metadata.namespace", text));
    }
    (name, namespace)
}

fn build(
    found: Findings,
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
        document: None,
        path,
        unsupported: found.unsupported,
        notes: found.notes,
    })
}
