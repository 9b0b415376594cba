//! Applies an instance type to a VMI. A field that both set is a conflict.

use serde_json::Value;

use super::json::{Object, below, edit, has_items, is_given, set, text};
use super::{at, cpu, memory};
use crate::field::FieldError;
use crate::types::{InstancetypeSpec, PreferenceSpec};

/// Applies an instance type, and returns the conflicts.
pub(super) fn instancetype(
    instancetype: &InstancetypeSpec,
    preference: Option<&PreferenceSpec>,
    spec: &mut Object,
    annotations: &mut Object,
) -> Vec<FieldError> {
    let mut conflicts = Vec::new();
    placement(instancetype, spec, &mut conflicts);
    edit(spec, "domain", |domain| {
        cpu::apply(&instancetype.cpu, preference, domain, &mut conflicts);
        memory::apply(&instancetype.memory, domain, &mut conflicts);
        threads_and_devices(instancetype, domain, &mut conflicts);
    });
    for (key, value) in &instancetype.annotations {
        match annotations.get(key).filter(|given| !given.is_null()) {
            Some(given) if given.as_str() == Some(value) => {}
            Some(_) => conflicts.push(conflict(&format!("annotations.{key}"))),
            None => {
                annotations.insert(key.clone(), value.as_str().into());
            }
        }
    }
    conflicts
}

fn placement(instancetype: &InstancetypeSpec, spec: &mut Object, conflicts: &mut Vec<FieldError>) {
    if let Some(selector) = &instancetype.node_selector {
        if is_given(spec, "nodeSelector") {
            conflicts.push(conflict(&at("nodeSelector")));
        } else {
            let selector = selector
                .iter()
                .map(|(key, value)| (key.clone(), value.as_str().into()));
            spec.insert("nodeSelector".to_owned(), Value::Object(selector.collect()));
        }
    }
    if !instancetype.scheduler_name.is_empty() {
        if text(spec, "schedulerName").is_some() {
            conflicts.push(conflict(&at("schedulerName")));
        } else {
            set(spec, "schedulerName", Some(instancetype.scheduler_name.as_str()));
        }
    }
}

fn threads_and_devices(
    instancetype: &InstancetypeSpec,
    domain: &mut Object,
    conflicts: &mut Vec<FieldError>,
) {
    const POOL: &str = "supplementalPoolThreadCount";
    if let Some(count) = instancetype.io_threads.supplemental_pool_thread_count {
        if below(domain, &["ioThreads", POOL]).is_some() {
            conflicts.push(conflict(&at(&format!("domain.ioThreads.{POOL}"))));
        } else {
            edit(domain, "ioThreads", |threads| set(threads, POOL, Some(count)));
        }
    }
    let given = [
        (
            "ioThreadsPolicy",
            instancetype.io_threads_policy.clone().map(Value::from),
        ),
        ("launchSecurity", instancetype.launch_security.clone()),
    ];
    for (name, value) in given {
        let Some(value) = value else { continue };
        if is_given(domain, name) {
            conflicts.push(conflict(&at(&format!("domain.{name}"))));
        } else {
            domain.insert(name.to_owned(), value);
        }
    }
    edit(domain, "devices", |devices| {
        let lists = [
            ("gpus", &instancetype.gpus),
            ("hostDevices", &instancetype.host_devices),
        ];
        for (name, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
            if has_items(devices, name) {
                conflicts.push(conflict(&at(&format!("domain.devices.{name}"))));
            } else {
                devices.insert(name.to_owned(), Value::Array(list.clone()));
            }
        }
    });
}

/// KubeVirt's error of a field that VM and instance type give.
pub(super) fn conflict(path: &str) -> FieldError {
    let text = format!("VM field(s) {path} conflicts with selected instance type");
    FieldError::invalid(path, text)
}
