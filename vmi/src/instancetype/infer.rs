//! Instance types and preferences that the labels of a volume name.

use std::collections::BTreeMap;

use serde_json::Value;

use super::json::{Object, edit};
use super::{Lookup, find};
use crate::field::FieldError;
use crate::objects::{DataVolume, DataVolumeSource, InferFromVolumeFailurePolicy, Matcher, VirtualMachine};

/// The matchers of a VM, with names.
pub(super) struct Matchers {
    pub(super) instancetype: Option<Matcher>,
    pub(super) preference: Option<Matcher>,
}

/// Infers the names that the VM leaves to its volumes.
pub(super) fn infer(
    vm: &VirtualMachine,
    objects: &(impl Lookup + ?Sized),
    template: &mut Object,
) -> Result<Matchers, Vec<FieldError>> {
    let instancetype = one(vm, objects, "instancetype", vm.instancetype.as_ref());
    let preference = one(vm, objects, "preference", vm.preference.as_ref());
    let (instancetype, preference) = match (instancetype, preference) {
        (Ok(instancetype), Ok(preference)) => (instancetype, preference),
        (instancetype, preference) => {
            let faults = [instancetype.err(), preference.err()];
            return Err(faults.into_iter().flatten().collect());
        }
    };
    // The template's memory is then only for a VM without an instance type.
    if vm.instancetype.as_ref().is_some_and(infers_at_will) && instancetype.is_some() {
        edit(template, "spec", |spec| {
            edit(spec, "domain", |domain| domain.remove("memory"))
        });
    }
    Ok(Matchers {
        instancetype,
        preference,
    })
}

impl Matchers {
    /// Names the objects in the annotations of the VMI, as KubeVirt's controller does.
    pub(super) fn annotate(&self, template: &mut Object) {
        let both = [
            ("instancetype", &self.instancetype),
            ("preference", &self.preference),
        ];
        for (field, matcher) in both {
            let Some(matcher) = matcher else { continue };
            let scope = match find::is_of_cluster(&matcher.kind) {
                Some(true) => "cluster-",
                _ => "",
            };
            let key = format!("kubevirt.io/{scope}{field}-name");
            edit(template, "metadata", |metadata| {
                edit(metadata, "annotations", |all| {
                    all.insert(key, matcher.name.as_str().into())
                })
            });
        }
    }
}

fn infers_at_will(matcher: &Matcher) -> bool {
    !matcher.infer_from_volume.is_empty()
        && matcher.infer_from_volume_failure_policy == InferFromVolumeFailurePolicy::Ignore
}

/// Why nothing can be inferred.
enum Fault {
    /// The volume does not name an object; the failure policy decides.
    Unnamed(String),
    /// The volume, or its claim, is missing.
    Missing(String),
}

fn one(
    vm: &VirtualMachine,
    objects: &(impl Lookup + ?Sized),
    field: &str,
    matcher: Option<&Matcher>,
) -> Result<Option<Matcher>, FieldError> {
    let Some(matcher) = matcher else {
        return Ok(None);
    };
    if matcher.infer_from_volume.is_empty() {
        return Ok(Some(matcher.clone()));
    }
    let label = format!("instancetype.kubevirt.io/default-{field}");
    match from_volume(vm, objects, &matcher.infer_from_volume, &label) {
        Ok(inferred) => Ok(Some(inferred)),
        Err(Fault::Unnamed(_)) if infers_at_will(matcher) => Ok(None),
        Err(Fault::Unnamed(text) | Fault::Missing(text)) => Err(FieldError::not_found(
            format!("spec.{field}.inferFromVolume"),
            text,
        )),
    }
}

fn from_volume(
    vm: &VirtualMachine,
    objects: &(impl Lookup + ?Sized),
    name: &str,
    label: &str,
) -> Result<Matcher, Fault> {
    let text = |value: &Value, path: &str| value.pointer(path).and_then(Value::as_str).map(str::to_owned);
    let volume = vm
        .volumes()
        .find(|volume| volume.get("name").and_then(Value::as_str) == Some(name));
    let Some(volume) = volume else {
        let text = format!("unable to find volume {name} to infer defaults");
        return Err(Fault::Missing(text));
    };
    let namespace = &vm.metadata.namespace;
    if let Some(claim) = text(volume, "/persistentVolumeClaim/claimName") {
        return from_claim(objects, namespace, &claim, label);
    }
    let Some(data) = text(volume, "/dataVolume/name") else {
        let text = format!("unable to infer defaults from volume {name} as type is not supported");
        return Err(Fault::Unnamed(text));
    };
    let template = vm
        .data_volume_templates
        .iter()
        .find(|template| template.metadata.name == data);
    if let Some(template) = template {
        return from_source(objects, template, label);
    }
    match objects.data_volume(namespace, &data) {
        None => from_claim(objects, namespace, &data, label),
        Some(data) => {
            from_labels(&data.metadata.labels, label).or_else(|_| from_source(objects, data, label))
        }
    }
}

fn from_source(objects: &(impl Lookup + ?Sized), data: &DataVolume, label: &str) -> Result<Matcher, Fault> {
    match &data.source {
        DataVolumeSource::Pvc { namespace, name } => from_claim(objects, namespace, name, label),
        _ => {
            let text = "unable to infer defaults from DataVolumeSpec as DataVolumeSource is not supported";
            Err(Fault::Unnamed(text.to_owned()))
        }
    }
}

fn from_claim(
    objects: &(impl Lookup + ?Sized),
    namespace: &str,
    name: &str,
    label: &str,
) -> Result<Matcher, Fault> {
    match objects.claim_labels(namespace, name) {
        Some(labels) => from_labels(&labels, label),
        None => Err(Fault::Missing(format!(
            "persistentvolumeclaims \"{name}\" not found"
        ))),
    }
}

fn from_labels(labels: &BTreeMap<String, String>, label: &str) -> Result<Matcher, Fault> {
    let Some(name) = labels.get(label) else {
        let text = format!("unable to find required {label} label on the volume");
        return Err(Fault::Unnamed(text));
    };
    let kind = labels.get(&format!("{label}-kind"));
    Ok(Matcher {
        name: name.clone(),
        kind: kind.cloned().unwrap_or_default(),
        ..Matcher::default()
    })
}
