//! A VM of the store: a VirtualMachine, or a VirtualMachineInstance of its own.

use husk_objects::{Key, Kind, StoredObject};
use husk_vmi::instancetype::expand;
use husk_vmi::objects::{DataVolume, Object, ObjectKind, RunStrategy};
use husk_vmi::{Vmi, validate};
use serde_json::Value;

use crate::vm_ref::VmRef;

/// The VMI that a VM of the store describes.
#[derive(Debug)]
pub(crate) struct ExpandedVm {
    pub vmi: Vmi,
    /// The VMI as a manifest.
    pub manifest: Value,
    /// The VM's `dataVolumeTemplates`.
    pub data_volumes: Vec<DataVolume>,
}

/// The keys that a VM may have.
pub(crate) fn keys(vm: &VmRef) -> [Key; 2] {
    [Kind::VirtualMachine, Kind::VirtualMachineInstance].map(|kind| Key::new(kind, &vm.namespace, &vm.name))
}

/// Name of the VM.
pub(crate) fn name(key: &Key) -> VmRef {
    VmRef {
        namespace: key.namespace.clone(),
        name: key.name.clone(),
    }
}

/// When the VM runs. A VMI runs once.
pub(crate) fn run_strategy(vm: &StoredObject) -> RunStrategy {
    match &vm.object.kind {
        ObjectKind::VirtualMachine(vm) => vm.run_strategy,
        _ => RunStrategy::Once,
    }
}

/// The value of `spec.runStrategy` or `spec.running`.
pub(crate) fn strategy_name(strategy: RunStrategy) -> &'static str {
    match strategy {
        RunStrategy::Always => "Always",
        RunStrategy::RerunOnFailure => "RerunOnFailure",
        RunStrategy::Manual => "Manual",
        RunStrategy::Halted => "Halted",
        RunStrategy::Once => "Once",
    }
}

/// Sets `spec.running` if the VM has it, else `spec.runStrategy`.
pub(crate) fn set_runs(vm: &mut Value, runs: bool) {
    let spec = &mut vm["spec"];
    match spec.get("running") {
        Some(_) => spec["running"] = runs.into(),
        None => spec["runStrategy"] = if runs { "Always" } else { "Halted" }.into(),
    }
}

/// Applies instance type and preference of a VM, and checks the result.
///
/// # Errors
/// A line for each wrong field.
pub(crate) fn expanded(object: &Object, known: &[Object]) -> Result<ExpandedVm, Vec<String>> {
    let lines = |errors: Vec<husk_vmi::FieldError>| -> Vec<String> {
        errors.iter().map(ToString::to_string).collect()
    };
    let expanded = match &object.kind {
        ObjectKind::VirtualMachine(vm) => {
            let expansion = expand(vm, known).map_err(lines)?;
            ExpandedVm {
                vmi: expansion.vmi,
                manifest: expansion.manifest,
                data_volumes: expansion.data_volumes,
            }
        }
        ObjectKind::VirtualMachineInstance(vmi) => ExpandedVm {
            vmi: Vmi::clone(vmi),
            manifest: object.value.clone(),
            data_volumes: Vec::new(),
        },
        _ => return Err(vec!["it is no VM".to_owned()]),
    };
    validate(&expanded.vmi).map_err(lines)?;
    Ok(expanded)
}
