//! Building manifests for tests.
#![allow(dead_code, reason = "each test binary uses a part")]

use husk_vmi::{FieldError, LoadError, Loaded, Vmi, load, validate};
use serde_json::{Value, json};

/// A small VMI that runs.
pub fn base() -> Value {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": "testvmi"},
        "spec": {
            "domain": {
                "devices": {"disks": [{"name": "root", "disk": {"bus": "virtio"}}]},
                "resources": {"requests": {"memory": "128Mi"}},
            },
            "volumes": [{"name": "root", "persistentVolumeClaim": {"claimName": "root"}}],
        },
    })
}

/// The base with values set at JSON pointers below `spec`; a pointer's last step may be new, and so may objects on it.
pub fn with(changes: &[(&str, Value)]) -> Value {
    let mut manifest = base();
    for (pointer, value) in changes {
        set(&mut manifest["spec"], pointer, value.clone());
    }
    manifest
}

fn set(target: &mut Value, pointer: &str, value: Value) {
    let mut at = target;
    for step in pointer.split('/') {
        at = match step.parse::<usize>() {
            Ok(index) if at.is_array() => &mut at[index],
            _ => &mut at[step],
        };
    }
    *at = value;
}

/// Reads the only VM of a manifest.
pub fn vmi(manifest: &Value) -> Vmi {
    match load(&manifest.to_string()).unwrap().into_iter().next().unwrap() {
        Loaded::Vmi(vmi) => *vmi,
        other => panic!("{other:?}"),
    }
}

/// All faults of a manifest, by loading or by validation.
pub fn faults(manifest: &Value) -> Vec<FieldError> {
    match load(&manifest.to_string()) {
        Ok(_) => validate(&vmi(manifest)).err().unwrap_or_default(),
        Err(LoadError::Invalid(documents)) => documents.into_iter().flat_map(|bad| bad.errors).collect(),
        Err(other) => panic!("{other}"),
    }
}

/// Asserts that a fault is among those of the base with changes: reason, field and exact message.
#[track_caller]
pub fn refused(changes: &[(&str, Value)], reason: &str, field: &str, message: &str) {
    let faults = faults(&with(changes));
    let found = faults.iter().any(|fault| {
        let cause = serde_json::to_value(fault).unwrap();
        cause["reason"] == reason && cause["field"] == field && cause["message"] == message
    });
    assert!(found, "no {reason} at {field}:\n  {message}\nbut\n{faults:#?}");
}
