//! A VM of `husk apply`: a VirtualMachine, or a VirtualMachineInstance of its own.

use husk_objects::{Key, Kind, StoredObject};
use husk_vmi::instancetype::expand;
use husk_vmi::objects::{DataVolume, Object, ObjectKind, RunStrategy};
use husk_vmi::{CauseReason, FieldError, Vmi, subdomain_fault, validate};
use serde_json::Value;

use super::claim_of;
use crate::vm_ref::VmRef;

/// The VMI that a VM of `husk apply` describes.
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
/// See [`expand`] and [`validate`]; or it has fields that only a cluster can provide.
pub(crate) fn expanded(object: &Object, known: &[Object]) -> Result<ExpandedVm, Vec<FieldError>> {
    let expanded = match &object.kind {
        ObjectKind::VirtualMachine(vm) => {
            let expansion = expand(vm, known)?;
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
        _ => {
            return Err(vec![FieldError {
                reason: CauseReason::FieldValueInvalid,
                field: "kind".to_owned(),
                message: "it is no VM".to_owned(),
            }]);
        }
    };
    validate(&expanded.vmi)?;
    let errors: Vec<_> = missing(&expanded.vmi)
        .into_iter()
        .chain(claim_names(&expanded.vmi))
        .collect();
    match errors.is_empty() {
        true => Ok(expanded),
        false => Err(errors),
    }
}

/// True if the error is of an instance type or preference that is not there, or that a volume does not name.
pub(crate) fn is_of_missing_object(error: &FieldError) -> bool {
    let of = |field: &str| error.field.starts_with(field);
    error.reason == CauseReason::FieldValueNotFound && (of("spec.instancetype.") || of("spec.preference."))
}

/// Errors for the names of claims that no claim has. They become parts of paths.
fn claim_names(vmi: &Vmi) -> impl Iterator<Item = FieldError> {
    vmi.spec.volumes.iter().enumerate().filter_map(|(index, volume)| {
        let fault = subdomain_fault(claim_of(volume)?)?;
        let field = match () {
            () if volume.persistent_volume_claim.is_some() => "persistentVolumeClaim.claimName",
            () if volume.ephemeral.is_some() => "ephemeral.persistentVolumeClaim.claimName",
            () => "dataVolume.name",
        };
        Some(FieldError {
            reason: CauseReason::FieldValueInvalid,
            field: vmi.at(&format!("volumes[{index}].{field}")),
            message: fault.to_owned(),
        })
    })
}

/// Errors for the networks and volumes that only a cluster can provide.
fn missing(vmi: &Vmi) -> Vec<FieldError> {
    let error = |field: String, message: &str| FieldError {
        reason: CauseReason::FieldValueNotSupported,
        field: vmi.at(&field),
        message: message.to_owned(),
    };
    let absent = |name: &str| {
        let interfaces = &vmi.spec.domain.devices.interfaces;
        interfaces
            .iter()
            .any(|interface| interface.name == name && interface.is_absent())
    };
    let networks = vmi.spec.networks.iter().enumerate();
    let multus = networks.filter(|(_, network)| network.multus.is_some() && !absent(&network.name));
    let volumes = vmi.spec.volumes.iter().enumerate();
    let accounts = volumes.filter(|(_, volume)| volume.service_account.is_some());
    multus
        .map(|(index, _)| {
            error(
                format!("networks[{index}].multus"),
                "VMs of `husk apply` have the pod network only; `husk run --netns` takes others",
            )
        })
        .chain(accounts.map(|(index, _)| {
            error(
                format!("volumes[{index}].serviceAccount"),
                "a machine without a cluster has no service accounts: remove the volume",
            )
        }))
        .collect()
}
