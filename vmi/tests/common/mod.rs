//! Building manifests for tests.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::PathBuf;

use husk_vmi::{FieldError, LoadError, Loaded, PodResources, VmPlan, Vmi, load, validate};
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

/// The resources of a pod that has these volumes: names and paths.
pub fn resources(volumes: &[(&str, &str)]) -> PodResources {
    PodResources {
        volumes: volumes
            .iter()
            .map(|(name, path)| ((*name).to_owned(), PathBuf::from(path)))
            .collect(),
        uuid: "11111111-2222-4333-8444-555555555555".parse().unwrap(),
        now_unix_seconds: 1_782_864_000, // 2026-07-01
        ..PodResources::default()
    }
}

/// The warnings of a plan, as lines.
pub fn warnings_of(plan: &VmPlan) -> Vec<String> {
    plan.warnings.iter().map(ToString::to_string).collect()
}
