//! From the text of a manifest to the VMIs in it.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::field::{FieldError, Note, OneLine};
use crate::schema::{Found, VM_SPEC, VMI_SPEC, check};
use crate::types::Spec;

/// The largest manifest that is read, in bytes.
pub const MANIFEST_LIMIT: usize = 1 << 20;
/// The most documents in a manifest.
const DOCUMENTS: usize = 256;
/// The deepest nesting; Kubernetes' own objects stay below 20.
const DEPTH: usize = 64;

/// A VirtualMachineInstance, or the one a VirtualMachine would make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmi {
    /// Its name, a DNS-1123 subdomain.
    pub name: String,
    /// Its namespace, a DNS-1123 label.
    pub namespace: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// What it asks for.
    pub spec: Spec,
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

/// Why a manifest cannot be used. Each prints on one line, but for [`LoadError::Invalid`]: one line per field.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It is too large to be a manifest.
    #[error("the manifest has {0} bytes; the limit is {MANIFEST_LIMIT}")]
    TooLarge(usize),
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
    Invalid(Vec<FieldError>),
}

fn found(kinds: &[String]) -> String {
    if kinds.is_empty() {
        String::new()
    } else {
        format!(" (found {})", OneLine(&kinds.join(", ")))
    }
}

fn lines(errors: &[FieldError]) -> String {
    errors
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("\n")
}

/// Reads a manifest: YAML or JSON, any number of documents, `List`s taken apart.
///
/// The fields are checked against KubeVirt's schema, and all faults are reported at once. What a valid field means,
/// and whether it is supported, is decided by [`validate`](crate::validate).
///
/// # Errors
/// See [`LoadError`].
pub fn load(text: &str) -> Result<Vec<Loaded>, LoadError> {
    if text.len() > MANIFEST_LIMIT {
        return Err(LoadError::TooLarge(text.len()));
    }
    let mut documents = Vec::new();
    for document in parse(text)? {
        expand(document, &mut documents);
    }
    let mut loaded = Vec::new();
    let mut errors = Vec::new();
    for document in documents {
        match read(&document) {
            Ok(document) => loaded.push(document),
            Err(faults) => errors.extend(faults),
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

/// Reads YAML within bounds: neither aliases nor nesting make more of a text than a small multiple of its size.
fn parse(text: &str) -> Result<Vec<Value>, LoadError> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_documents: DOCUMENTS,
            max_depth: DEPTH,
            max_aliases: 1000,
            max_anchors: 1000,
            max_recorded_anchor_bytes: MANIFEST_LIMIT,
            max_total_scalar_bytes: 4 * MANIFEST_LIMIT,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 20_000,
            max_replay_stack_depth: 8,
        },
        with_snippet: false,
    };
    serde_saphyr::from_multiple_with_options::<Value>(text, options).map_err(|error| {
        let location = error.location();
        let plain = error.render_with_formatter(&serde_saphyr::UserMessageFormatter);
        // The place is told apart from the message.
        let plain = plain
            .split(" at line ")
            .next()
            .unwrap_or_default()
            .trim_end_matches(" (defined");
        LoadError::Syntax {
            line: location.map_or(0, |l| l.line()),
            column: location.map_or(0, |l| l.column()),
            message: OneLine(plain.trim()).to_string(),
        }
    })
}

/// Takes a `List` apart.
fn expand(document: Value, into: &mut Vec<Value>) {
    match document {
        Value::Null => {}
        Value::Object(mut list) if list.get("kind").and_then(Value::as_str) == Some("List") => {
            match list.remove("items") {
                Some(Value::Array(items)) => into.extend(items),
                _ => into.push(Value::Object(list)),
            }
        }
        document => into.push(document),
    }
}

fn read(document: &Value) -> Result<Loaded, Vec<FieldError>> {
    let Value::Object(object) = document else {
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
    .map(|vmi| Loaded::Vmi(Box::new(vmi)))
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

fn read_vmi(object: &Map<String, Value>) -> Result<Vmi, Vec<FieldError>> {
    let mut found = envelope(object, "", &VMI_SPEC);
    let spec = spec(object.get("spec"), "spec", &mut found);
    let metadata = Metadata::of(object.get("metadata"));
    let (name, namespace) = identity(&metadata, &mut found);
    build(found, name, namespace, metadata, spec, "spec")
}

fn read_vm(object: &Map<String, Value>) -> Result<Vmi, Vec<FieldError>> {
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
    // A VirtualMachine's instances keep one system UUID, which depends on its name only.
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

fn run_strategy(vm: &Value, found: &mut Found) {
    let running = vm.get("running").and_then(Value::as_bool);
    let strategy = vm.get("runStrategy").and_then(Value::as_str);
    const STARTED: &str = "a cluster would leave it stopped; it is started because it is run here";
    const ENDED: &str = "a cluster would start it again when it has ended; it is not started again here";
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

/// Checks everything around the spec of a VMI, which for a VirtualMachine lies deeper.
fn envelope(object: &Map<String, Value>, path: &str, spec: &crate::schema::Kind) -> Found {
    let mut found = check(&Value::Object(object.clone()), &crate::schema::OBJECT, path);
    match object.get("spec") {
        Some(value) => found.merge(check(value, spec, "spec")),
        None => found
            .schema
            .push(FieldError::required("spec", "spec in body is required")),
    }
    found
}

/// Reads a spec that follows the schema; one that does not gives no types and has its faults in `found`.
fn spec(value: Option<&Value>, path: &str, found: &mut Found) -> Spec {
    let Some(value) = value.filter(|_| found.schema.is_empty()) else {
        return Spec::default();
    };
    serde_json::from_value(value.clone()).unwrap_or_else(|error| {
        found.schema.push(FieldError::invalid(path, error.to_string()));
        Spec::default()
    })
}

/// The part of an object's metadata that matters here.
#[derive(Debug, Default)]
struct Metadata {
    name: String,
    namespace: Option<String>,
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
            labels: map("labels"),
            annotations: map("annotations"),
        }
    }
}

fn identity(metadata: &Metadata, found: &mut Found) -> (String, String) {
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
    found: Found,
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
        labels: metadata.labels,
        annotations: metadata.annotations,
        spec,
        path,
        unsupported: found.unsupported,
        notes: found.notes,
    })
}
