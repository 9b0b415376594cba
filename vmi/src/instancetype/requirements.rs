//! Checks that a VM has what a preference requires.

use serde_json::Value;

use super::json::{Object, below, text};
use super::{at, spread};
use crate::field::FieldError;
use crate::quantity::Quantity;
use crate::types::{CpuRequirement, InstancetypeSpec, PreferenceSpec};

/// Checks the expanded spec, with KubeVirt's defaults.
pub(super) fn check(
    instancetype: Option<&InstancetypeSpec>,
    preference: &PreferenceSpec,
    spec: &Object,
) -> Result<(), FieldError> {
    let required = &preference.requirements;
    let none = Object::new();
    let domain = spec.get("domain").and_then(Value::as_object).unwrap_or(&none);
    if let Some(cpu) = &required.cpu {
        check_cpu(cpu, instancetype, preference, domain)?;
    }
    if let Some(least) = required.memory.as_ref().and_then(|memory| memory.guest) {
        check_memory(least, instancetype, domain)?;
    }
    let Some(wanted) = &required.architecture else {
        return Ok(());
    };
    let given = text(spec, "architecture").unwrap_or("amd64");
    if given == wanted {
        return Ok(());
    }
    let text = format!("preference requires architecture {wanted} but {given} is being requested");
    Err(failure(at("architecture"), &text))
}

fn check_cpu(
    required: &CpuRequirement,
    instancetype: Option<&InstancetypeSpec>,
    preference: &PreferenceSpec,
    domain: &Object,
) -> Result<(), FieldError> {
    let least = required.guest;
    if let Some(instancetype) = instancetype {
        let given = instancetype.cpu.guest;
        if given >= least {
            return Ok(());
        }
        let text = format!(
            "insufficient CPU resources of {given} vCPU provided by instance type, preference requires {least} vCPU"
        );
        return Err(failure("spec.instancetype".to_owned(), &text));
    }
    let (fields, name): (&[&str], &str) = match spread::topology(Some(preference)) {
        "threads" => (&["threads"], "threads"),
        "cores" => (&["cores"], "cores"),
        "sockets" => (&["sockets"], "sockets"),
        "any" => (&["cores", "sockets", "threads"], "cores, sockets and threads"),
        _ => match spread::options(preference).1 {
            across @ "SocketsCores" => (&["sockets", "cores"], across),
            across @ "CoresThreads" => (&["cores", "threads"], across),
            across => (&["sockets", "cores", "threads"], across),
        },
    };
    let counts = fields.iter().map(|field| count(domain, field));
    let given = counts.fold(1, u64::saturating_mul);
    if given >= u64::from(least) {
        return Ok(());
    }
    let paths: Vec<String> = fields
        .iter()
        .map(|field| at(&format!("domain.cpu.{field}")))
        .collect();
    let text = format!(
        "insufficient CPU resources of {given} vCPU provided by VirtualMachine, preference requires {least} vCPU \
         provided as {name}"
    );
    Err(failure(paths.join(", "), &text))
}

/// Number of sockets, cores or threads. If the VM gives none of them, its resources give the sockets.
fn count(domain: &Object, field: &str) -> u64 {
    let given = |field| {
        below(domain, &["cpu", field])
            .and_then(Value::as_u64)
            .unwrap_or(0)
    };
    if ["sockets", "cores", "threads"]
        .into_iter()
        .any(|field| given(field) != 0)
    {
        return given(field);
    }
    let resource = |list| quantity(below(domain, &["resources", list, "cpu"]));
    match field {
        "sockets" => match resource("limits").or_else(|| resource("requests")) {
            Some(cpus) => cpus.bytes().unwrap_or(0),
            None => 1,
        },
        _ => 1,
    }
}

fn check_memory(
    least: Quantity,
    instancetype: Option<&InstancetypeSpec>,
    domain: &Object,
) -> Result<(), FieldError> {
    let (field, by) = match instancetype {
        Some(_) => ("spec.instancetype".to_owned(), "instance type"),
        None => (at("domain.memory"), "VirtualMachine"),
    };
    let given = guest_memory(domain);
    if given >= least {
        return Ok(());
    }
    let text =
        format!("insufficient Memory resources of {given} provided by {by}, preference requires {least}");
    Err(failure(field, &text))
}

/// The guest's memory with KubeVirt's defaults.
fn guest_memory(domain: &Object) -> Quantity {
    let zero = Quantity::from_value(0);
    let resource =
        |list| quantity(below(domain, &["resources", list, "memory"])).filter(|size| *size != zero);
    quantity(below(domain, &["memory", "guest"]))
        .or_else(|| resource("requests"))
        .or_else(|| resource("limits"))
        .or_else(|| quantity(below(domain, &["memory", "hugepages", "pageSize"])))
        .unwrap_or(zero)
}

fn quantity(value: Option<&Value>) -> Option<Quantity> {
    serde_json::from_value(value?.clone()).ok()
}

fn failure(field: String, text: &str) -> FieldError {
    FieldError::not_found(field, format!("failure checking preference requirements: {text}"))
}
