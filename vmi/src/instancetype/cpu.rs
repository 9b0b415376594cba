//! vCPUs of an instance type.

use serde_json::Value;

use super::apply::conflict;
use super::json::{Object, below, edit, is_given, set, text};
use super::{at, spread};
use crate::field::FieldError;
use crate::types::{CpuInstancetype, PreferenceSpec};

pub(super) fn apply(
    instancetype: &CpuInstancetype,
    preference: Option<&PreferenceSpec>,
    domain: &mut Object,
    conflicts: &mut Vec<FieldError>,
) {
    let found = check(instancetype, domain);
    if !found.is_empty() {
        conflicts.extend(found);
        return;
    }
    let (sockets, cores, threads) = topology(instancetype.guest, preference);
    edit(domain, "cpu", |cpu| {
        set(cpu, "model", instancetype.model.as_deref());
        set(cpu, "dedicatedCpuPlacement", instancetype.dedicated_cpu_placement);
        set(cpu, "isolateEmulatorThread", instancetype.isolate_emulator_thread);
        set(cpu, "numa", instancetype.numa.clone());
        set(cpu, "realtime", instancetype.realtime.clone());
        set(cpu, "maxSockets", instancetype.max_sockets);
        set(cpu, "sockets", Some(sockets));
        set(cpu, "cores", Some(cores));
        set(cpu, "threads", Some(threads));
    });
}

/// Fields of the VMI that the instance type gives, in KubeVirt's order and under its names.
fn check(instancetype: &CpuInstancetype, domain: &Object) -> Vec<FieldError> {
    let none = Object::new();
    let cpu = domain.get("cpu").and_then(Value::as_object).unwrap_or(&none);
    let resource = |list| below(domain, &["resources", list, "cpu"]).is_some();
    let counted = |name| {
        cpu.get(name)
            .and_then(Value::as_u64)
            .is_some_and(|count| count != 0)
    };
    let on = |name| cpu.get(name) == Some(&Value::Bool(true));
    let conflicting = [
        ("resources.requests.cpu", resource("requests")),
        ("resources.limits.cpu", resource("limits")),
        ("cpu.sockets", counted("sockets")),
        ("cpu.cores", counted("cores")),
        ("cpu.threads", counted("threads")),
        (
            "cpu.model",
            instancetype.model.is_some() && text(cpu, "model").is_some(),
        ),
        (
            "cpu.dedicatedCPUPlacement",
            instancetype.dedicated_cpu_placement.is_some() && on("dedicatedCpuPlacement"),
        ),
        (
            "cpu.isolateEmulatorThread",
            instancetype.isolate_emulator_thread.is_some() && on("isolateEmulatorThread"),
        ),
        ("cpu.numa", instancetype.numa.is_some() && is_given(cpu, "numa")),
        (
            "cpu.realtime",
            instancetype.realtime.is_some() && is_given(cpu, "realtime"),
        ),
    ];
    let conflicting = conflicting.into_iter().filter(|(_, conflicts)| *conflicts);
    conflicting
        .map(|(field, _)| conflict(&at(&format!("domain.{field}"))))
        .collect()
}

/// Sockets, cores and threads.
fn topology(vcpus: u32, preference: Option<&PreferenceSpec>) -> (u32, u32, u32) {
    if vcpus == 1 {
        return (1, 1, 1);
    }
    match (spread::topology(preference), preference) {
        ("sockets" | "any", _) => (vcpus, 1, 1),
        ("cores", _) => (1, vcpus, 1),
        ("threads", _) => (1, 1, vcpus),
        ("spread", Some(preference)) => {
            let (ratio, across) = spread::options(preference);
            let divided = |vcpus: u32| vcpus.checked_div(ratio).unwrap_or(vcpus);
            match across {
                "SocketsCores" => (divided(vcpus), ratio, 1),
                "CoresThreads" => (1, divided(vcpus), ratio),
                "SocketsCoresThreads" => (divided(vcpus / spread::THREADS), ratio, spread::THREADS),
                _ => (1, 1, 1),
            }
        }
        _ => (1, 1, 1),
    }
}
