//! The `status` of objects in `husk get -o yaml`: computed now, with KubeVirt's fields.

use husk_claims::Claim;
use husk_objects::{Kind, StoredObject};
use serde_json::{Value, json};

use super::Known;
use crate::machine::{phase, vm};
use crate::vm_view::VmView;

/// The manifest of an object with its status. A VirtualMachine that is asked for as a VMI becomes its VMI.
pub(super) fn object(known: &Known, kind: Option<Kind>, object: &StoredObject) -> Value {
    let mut value = object.value().clone();
    match (object.key.kind, kind) {
        (Kind::VirtualMachine, Some(Kind::VirtualMachineInstance)) => {
            if let Ok(objects) = known.stores.known(&known.objects, &[])
                && let Ok(expanded) = vm::expanded(&object.object, &objects)
            {
                value = expanded.manifest;
            }
            value["status"] = vmi(known, object);
        }
        (Kind::VirtualMachine, _) => {
            let status = known.vm_status(object);
            value["status"] = json!({
                "printableStatus": status.printable,
                "ready": status.ready,
                "created": status.phase.is_some(),
                "runStrategy": vm::strategy_name(vm::run_strategy(object)),
                "conditions": [ready(status.ready, &status.printable, &status.message)],
            });
        }
        (Kind::VirtualMachineInstance, _) => value["status"] = vmi(known, object),
        (Kind::DataVolume, _) => {
            let phase = phase(&known.stores, &known.units, object);
            value["status"] =
                json!({"phase": phase.phase, "progress": phase.progress, "claimName": object.key.name});
            if !phase.message.is_empty() {
                value["status"]["message"] = json!(phase.message);
            }
        }
        _ => {}
    }
    value
}

fn vmi(known: &Known, object: &StoredObject) -> Value {
    let status = known.vm_status(object);
    let view = known.view(&vm::name(&object.key));
    let mut conditions = vec![ready(status.ready, &status.printable, &status.message)];
    if let Some(view) = view.filter(|view| view.paused) {
        let (reason, message) = match view.reason.as_str() {
            "" => ("PausedByUser", "VMI was paused by user"),
            reason => (reason, view.message.as_str()),
        };
        conditions.push(json!({"type": "Paused", "status": "True", "reason": reason, "message": message}));
    }
    json!({
        "phase": status.phase,
        "conditions": conditions,
        "interfaces": view.map(interfaces).unwrap_or_default(),
    })
}

fn interfaces(view: &VmView) -> Vec<Value> {
    let interfaces = view.interfaces.iter().map(|interface| {
        json!({
            "name": interface.name,
            "mac": interface.mac,
            "ipAddress": interface.addresses.first(),
            "ipAddresses": interface.addresses,
            "infoSource": "domain",
            "linkState": if interface.link_up { "up" } else { "down" },
        })
    });
    interfaces.collect()
}

fn ready(ready: bool, printable: &str, message: &str) -> Value {
    match ready {
        true => json!({"type": "Ready", "status": "True"}),
        false => json!({"type": "Ready", "status": "False", "reason": printable, "message": message}),
    }
}

/// The manifest of a claim with its status.
pub(super) fn claim(claim: &Claim) -> Value {
    let (metadata, spec) = (&claim.object.metadata, &claim.object.spec);
    let modes: Vec<&str> = spec.access_modes.iter().map(|mode| mode.name()).collect();
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": metadata.name,
            "namespace": metadata.namespace,
            "labels": metadata.labels,
            "annotations": metadata.annotations,
        },
        "spec": {
            "accessModes": modes,
            "volumeMode": spec.volume_mode.name(),
            "resources": {"requests": {"storage": spec.size.unwrap_or(claim.size).to_string()}},
        },
        "status": {"phase": "Bound", "accessModes": modes, "capacity": {"storage": claim.size.to_string()}},
    })
}
