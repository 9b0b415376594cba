//! VirtualMachines, kept whole until they are expanded.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::{DataVolume, ObjectKind, text};
use crate::field::FieldError;
use crate::load::{Metadata, RunStrategy, check_template};
use crate::schema::{Diagnostics, WHOLE_VM_SPEC, check};

/// A VirtualMachine. [`expand`](crate::instancetype::expand) makes its VMI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualMachine {
    /// Name, namespace and labels of the VM; those of its VMI are in the template.
    pub metadata: Metadata,
    /// `spec.runStrategy`, or `spec.running`.
    pub run_strategy: RunStrategy,
    /// `spec.dataVolumeTemplates`, in the VM's namespace.
    pub data_volume_templates: Vec<DataVolume>,
    /// `spec.instancetype`
    pub instancetype: Option<Matcher>,
    /// `spec.preference`
    pub preference: Option<Matcher>,
    /// `spec.template`; its fields' names and types are right.
    pub template: Value,
    /// As [`Vmi::document`](crate::Vmi::document).
    pub document: Option<String>,
}

/// `spec.instancetype` or `spec.preference` of a VirtualMachine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matcher {
    /// Name of the object; empty if it is inferred from a volume.
    pub name: String,
    /// Kind of the object, in any case, singular or plural; that of the whole cluster if empty.
    pub kind: String,
    /// Volume whose labels name the object, or nothing.
    pub infer_from_volume: String,
    /// What to do if the volume does not name it.
    pub infer_from_volume_failure_policy: InferFromVolumeFailurePolicy,
}

/// `inferFromVolumeFailurePolicy`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InferFromVolumeFailurePolicy {
    /// `RejectInferFromVolumeFailure`: an error, which is the default.
    #[default]
    Reject,
    /// `IgnoreInferFromVolumeFailure`: the VM has no instance type or preference.
    Ignore,
}

pub(super) fn read(object: &Map<String, Value>, metadata: Metadata, found: &mut Diagnostics) -> ObjectKind {
    let empty = Value::Object(Map::new());
    let spec = object.get("spec").unwrap_or(&empty);
    found.merge(check(spec, &WHOLE_VM_SPEC, "spec"));
    let template = spec.get("template").cloned().unwrap_or_default();
    // Support is judged once the VM is expanded.
    found.schema.extend(check_template(&template).schema);
    let run_strategy = RunStrategy::of(spec).map_or_else(
        |error| {
            found.schema.push(error);
            RunStrategy::Halted
        },
        |(strategy, _)| strategy,
    );
    let matcher = |name, found: &mut Diagnostics| {
        let matcher = spec.get(name)?.as_object()?;
        Some(Matcher::of(matcher, name, &mut found.schema))
    };
    let mut vm = VirtualMachine {
        instancetype: matcher("instancetype", found),
        preference: matcher("preference", found),
        metadata,
        run_strategy,
        data_volume_templates: Vec::new(),
        template,
        document: None,
    };
    if found.schema.is_empty() {
        vm.data_volume_templates = data_volume_templates(spec, &vm, &mut found.schema);
    }
    ObjectKind::VirtualMachine(Box::new(vm))
}

fn data_volume_templates(spec: &Value, vm: &VirtualMachine, errors: &mut Vec<FieldError>) -> Vec<DataVolume> {
    let templates = spec.get("dataVolumeTemplates").and_then(Value::as_array);
    let templates = templates.into_iter().flatten().filter_map(Value::as_object);
    let used = vm.claims();
    let read = templates.enumerate().map(|(i, template)| {
        // KubeVirt's path.
        let entry = format!("spec.dataVolumeTemplate[{i}]");
        let path = format!("spec.dataVolumeTemplates[{i}].");
        let given = super::object(template, "metadata").and_then(|metadata| text(metadata, "namespace"));
        let namespace = vm.metadata.namespace.clone();
        if let Some(given) = given.filter(|given| *given != namespace) {
            let text = format!("Embedded DataVolume namespace {given} differs from VM namespace {namespace}");
            errors.push(FieldError::invalid(path.trim_end_matches('.'), text));
        }
        let metadata = Metadata {
            namespace,
            ..Metadata::of(template.get("metadata"))
        };
        let name = &metadata.name;
        if name.is_empty() {
            let text = format!("'name' field must not be empty for DataVolumeTemplate entry {entry}.name.");
            errors.push(FieldError::required(format!("{entry}.name"), text));
        } else {
            super::check_name(name, &format!("{path}metadata.name"), errors);
            if !used.contains(name.as_str()) {
                let text = format!(
                    "DataVolumeTemplate entry {entry} must be referenced in the VMI template's 'volumes' list"
                );
                errors.push(FieldError::required(entry, text));
            }
        }
        DataVolume::of(template, metadata, &path, errors)
    });
    read.collect()
}

impl VirtualMachine {
    /// The volumes of its template, as JSON.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = &Value> {
        let spec = self.template.get("spec");
        let volumes = spec
            .and_then(|spec| spec.get("volumes"))
            .and_then(Value::as_array);
        volumes.into_iter().flatten()
    }

    /// Names of the claims and DataVolumes that its volumes use.
    fn claims(&self) -> HashSet<&str> {
        let sources = self.volumes().flat_map(|volume| {
            [
                volume.pointer("/persistentVolumeClaim/claimName"),
                volume.pointer("/dataVolume/name"),
            ]
        });
        sources.flatten().filter_map(Value::as_str).collect()
    }
}

impl Matcher {
    /// Reads `spec.FIELD`, with the rules of KubeVirt's webhook.
    fn of(matcher: &Map<String, Value>, field: &str, errors: &mut Vec<FieldError>) -> Self {
        let given = |name| text(matcher, name).unwrap_or_default().to_owned();
        let path = format!("spec.{field}");
        let mut read = Self {
            name: given("name"),
            kind: given("kind"),
            infer_from_volume: given("inferFromVolume"),
            ..Self::default()
        };
        let infers = !read.infer_from_volume.is_empty();
        if read.name.is_empty() && !infers {
            let kind = if field == "preference" {
                "Preference"
            } else {
                "Instancetype"
            };
            let text = format!("Either Name or InferFromVolume should be provided within the {kind}Matcher");
            errors.push(FieldError::not_found(&path, text));
        }
        for (name, label, given) in [("name", "Name", &read.name), ("kind", "Kind", &read.kind)] {
            if infers && !given.is_empty() {
                let text = format!("{label} already set, should be cleared before setting inferFromVolume");
                errors.push(FieldError::unsupported(format!("{path}.{name}"), text));
            }
        }
        match matcher
            .get("inferFromVolumeFailurePolicy")
            .and_then(Value::as_str)
        {
            None | Some("RejectInferFromVolumeFailure") => {}
            Some("IgnoreInferFromVolumeFailure") => {
                read.infer_from_volume_failure_policy = InferFromVolumeFailurePolicy::Ignore;
            }
            Some(other) => {
                let text = format!("Invalid value '{other}' for InferFromVolumeFailurePolicy");
                let field = format!("{path}.inferFromVolumeFailurePolicy");
                errors.push(FieldError::invalid(field, text));
            }
        }
        read
    }
}
