//! Expansion of a VirtualMachine: its VMI with what instance type and preference give it.
//!
//! Order, rules, texts and paths are those of KubeVirt v1.9: its webhooks for VirtualMachines, `expand-spec`, and the
//! controller that creates the VMI. A field is written as if the manifest had it, so it is honoured, accepted with a
//! warning or refused like there.

mod apply;
mod cpu;
mod devices;
mod find;
mod infer;
mod json;
mod lookup;
mod memory;
mod preference;
mod requirements;
pub(crate) mod spread;
#[cfg(test)]
mod tests;

use serde_json::{Map, Value, json};

use crate::field::FieldError;
use crate::load::{TEMPLATE_SPEC, Vmi, check_template, expanded};
use crate::objects::{DataVolume, VirtualMachine};
use crate::types::{InstancetypeSpec, PreferenceSpec};

pub use lookup::Lookup;

/// A VirtualMachine that its instance type and preference have been applied to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expansion {
    /// The VMI. [`validate`](crate::validate) has not checked it.
    pub vmi: Vmi,
    /// The same VMI as a manifest.
    pub manifest: Value,
    /// The VM's `dataVolumeTemplates`, with the preferred storage class where they name none.
    pub data_volumes: Vec<DataVolume>,
}

/// Applies instance type and preference to a VirtualMachine; one without either becomes the VMI of its template.
///
/// # Errors
/// The objects that are missing, else the conflicts with the instance type, the requirement that the VM does not meet,
/// or the fields that are not as the schema has them. Never an empty list.
pub fn expand(vm: &VirtualMachine, objects: &(impl Lookup + ?Sized)) -> Result<Expansion, Vec<FieldError>> {
    let faults = check_template(&vm.template).schema;
    if !faults.is_empty() {
        return Err(faults);
    }
    let Value::Object(mut template) = vm.template.clone() else {
        let text = "spec.template in body is required";
        return Err(vec![FieldError::required("spec.template", text)]);
    };
    let matchers = infer::infer(vm, objects, &mut template)?;
    let instancetype = find::instancetype(vm, matchers.instancetype.as_ref(), objects);
    let preference = find::preference(vm, matchers.preference.as_ref(), objects);
    let (instancetype, preference) = match (instancetype, preference) {
        (Ok(instancetype), Ok(preference)) => (instancetype, preference),
        (instancetype, preference) => {
            let faults = [instancetype.err(), preference.err()];
            return Err(faults.into_iter().flatten().collect());
        }
    };
    if instancetype.is_some() || preference.is_some() {
        matchers.annotate(&mut template);
        apply_both(&mut template, instancetype, preference)?;
    }
    let template = Value::Object(template);
    let vmi = Vmi {
        document: vm.document.clone(),
        ..expanded(&vm.metadata, &template)?
    };
    Ok(Expansion {
        manifest: manifest(&vmi, template),
        vmi,
        data_volumes: data_volumes(vm, preference),
    })
}

/// The VMI of an expanded template, which has no name and no namespace.
fn manifest(vmi: &Vmi, mut template: Value) -> Value {
    let mut metadata = template["metadata"].take();
    if !metadata.is_object() {
        metadata = json!({});
    }
    metadata["name"] = json!(vmi.name);
    metadata["namespace"] = json!(vmi.namespace);
    let mut spec = template["spec"].take();
    if let Some(spec) = spec.as_object_mut() {
        let uuid = vmi.spec.domain.firmware.uuid.as_deref();
        json::edit(spec, "domain", |domain| {
            json::edit(domain, "firmware", |firmware| json::set(firmware, "uuid", uuid));
        });
    }
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": metadata,
        "spec": spec,
    })
}

fn apply_both(
    template: &mut Map<String, Value>,
    instancetype: Option<&InstancetypeSpec>,
    preference: Option<&PreferenceSpec>,
) -> Result<(), Vec<FieldError>> {
    if let (Some(instancetype), Some(preference)) = (instancetype, preference) {
        spread::check(instancetype.cpu.guest, preference).map_err(|fault| vec![fault])?;
    }
    let mut spec = json::take(template, "spec");
    let mut annotations = json::edit(template, "metadata", |metadata| {
        json::take(metadata, "annotations")
    });
    set_default_disks(&mut spec);
    if let Some(preference) = preference {
        // The preference decides first whether there is a default interface.
        json::edit(&mut spec, "domain", |domain| {
            json::edit(domain, "devices", |devices| {
                devices::attach(devices, &preference.devices)
            });
        });
    }
    set_default_interface(&mut spec);
    if let Some(instancetype) = instancetype {
        let conflicts = apply::instancetype(instancetype, preference, &mut spec, &mut annotations);
        if !conflicts.is_empty() {
            return Err(conflicts);
        }
    }
    if let Some(preference) = preference {
        preference::apply(preference, &mut spec, &mut annotations);
        requirements::check(instancetype, preference, &spec).map_err(|fault| vec![fault])?;
    }
    template.insert("spec".to_owned(), Value::Object(spec));
    json::edit(template, "metadata", |metadata| {
        metadata.insert("annotations".to_owned(), Value::Object(annotations));
    });
    Ok(())
}

/// Adds a disk for each volume without a device of its name.
fn set_default_disks(spec: &mut Map<String, Value>) {
    let names = |list: Option<&Value>| -> Vec<String> {
        let items = list.and_then(Value::as_array).into_iter().flatten();
        let names = items.filter_map(|item| item.get("name").and_then(Value::as_str));
        names.map(str::to_owned).collect()
    };
    let volumes = names(spec.get("volumes"));
    json::edit(spec, "domain", |domain| {
        json::edit(domain, "devices", |devices| {
            let mut known = names(devices.get("disks"));
            known.extend(names(devices.get("filesystems")));
            let known: std::collections::HashSet<_> = known.into_iter().collect();
            let missing = volumes.into_iter().filter(|volume| !known.contains(volume));
            let missing: Vec<_> = missing.map(|volume| json!({"name": volume})).collect();
            json::append(devices, "disks", missing);
        });
    });
}

/// Adds KubeVirt's default interface to a VMI without networks and interfaces.
fn set_default_interface(spec: &mut Map<String, Value>) {
    let has_networks = json::has_items(spec, "networks");
    let added = json::edit(spec, "domain", |domain| {
        json::edit(domain, "devices", |devices| {
            let off = devices.get("autoattachPodInterface") == Some(&Value::Bool(false));
            if off || has_networks || json::has_items(devices, "interfaces") {
                return false;
            }
            json::append(
                devices,
                "interfaces",
                vec![json!({"name": "default", "bridge": {}})],
            );
            true
        })
    });
    if added {
        json::append(spec, "networks", vec![json!({"name": "default", "pod": {}})]);
    }
}

fn data_volumes(vm: &VirtualMachine, preference: Option<&PreferenceSpec>) -> Vec<DataVolume> {
    let mut data_volumes = vm.data_volume_templates.clone();
    let class = preference.map(|preference| &preference.volumes.preferred_storage_class_name);
    if let Some(class) = class.filter(|class| !class.is_empty()) {
        for data in &mut data_volumes {
            data.claim.storage_class_name.get_or_insert_with(|| class.clone());
        }
    }
    data_volumes
}

/// Path of a field of the VMI's spec.
fn at(field: &str) -> String {
    format!("{TEMPLATE_SPEC}.{field}")
}
