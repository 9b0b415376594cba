//! Applies a preference to a VMI: it sets the fields that neither the VM nor its instance type sets, with KubeVirt's
//! exceptions.

use serde_json::{Map, Value};

use super::devices;
use super::json::{Object, append, edit, is_given, set, set_absent, set_empty};
use crate::types::{ClockPreferences, FirmwarePreferences, PreferenceSpec};

pub(super) fn apply(preference: &PreferenceSpec, spec: &mut Object, annotations: &mut Object) {
    let on_pod = pod_networks(spec);
    edit(spec, "domain", |domain| {
        cpu_features(&preference.cpu.preferred_cpu_features, domain);
        edit(domain, "devices", |devices| {
            devices::apply(devices, &preference.devices, &on_pod)
        });
        if !preference.features.is_empty() {
            edit(domain, "features", |target| {
                features(target, &preference.features)
            });
        }
        edit(domain, "firmware", |target| {
            edit(target, "bootloader", |target| {
                bootloader(target, &preference.firmware)
            });
        });
        let machine = Some(preference.machine.preferred_machine_type.as_str());
        edit(domain, "machine", |target| set_empty(target, "type", machine));
        edit(domain, "clock", |target| clock(target, &preference.clock));
        set_absent(
            domain,
            "launchSecurity",
            preference.preferred_launch_security.clone(),
        );
    });
    set_empty(spec, "subdomain", preference.preferred_subdomain.as_deref());
    set_absent(
        spec,
        "terminationGracePeriodSeconds",
        preference.preferred_termination_grace_period_seconds,
    );
    set_empty(spec, "architecture", preference.preferred_architecture.as_deref());
    for (key, value) in &preference.annotations {
        set_absent(annotations, key, Some(value.as_str()));
    }
}

/// Names of the networks that are the pod's.
fn pod_networks(spec: &Object) -> Vec<String> {
    let networks = spec
        .get("networks")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let on_pod = networks.filter(|network| network.get("pod").is_some_and(|pod| !pod.is_null()));
    let names = on_pod.filter_map(|network| network.get("name").and_then(Value::as_str));
    names.map(str::to_owned).collect()
}

fn cpu_features(preferred: &[Value], domain: &mut Object) {
    if preferred.is_empty() {
        return;
    }
    edit(domain, "cpu", |cpu| {
        let given = cpu
            .get("features")
            .and_then(Value::as_array)
            .into_iter()
            .flatten();
        let given: Vec<Value> = given.filter_map(|feature| feature.get("name").cloned()).collect();
        let new = preferred.iter().filter(|feature| match feature.get("name") {
            Some(name) => !given.contains(name),
            None => true,
        });
        let new = new.cloned().collect();
        append(cpu, "features", new);
    });
}

fn features(target: &mut Object, preferred: &Map<String, Value>) {
    // KubeVirt cannot tell whether the VM gives this one.
    set(target, "acpi", preferred.get("preferredAcpi").cloned());
    for (name, preference) in [
        ("apic", "preferredApic"),
        ("kvm", "preferredKvm"),
        ("pvspinlock", "preferredPvspinlock"),
        ("smm", "preferredSmm"),
    ] {
        set_absent(target, name, preferred.get(preference).cloned());
    }
    if let Some(hyperv) = preferred.get("preferredHyperv").and_then(Value::as_object) {
        edit(target, "hyperv", |target| {
            for (name, value) in hyperv {
                set_absent(target, name, Some(value.clone()));
            }
        });
    }
}

fn bootloader(target: &mut Object, preferred: &FirmwarePreferences) {
    let has_loader = |target: &Object| is_given(target, "bios") || is_given(target, "efi");
    let empty = || Value::Object(Map::new());
    if preferred.preferred_use_bios == Some(true) && !has_loader(target) {
        target.insert("bios".to_owned(), empty());
    }
    if is_given(target, "bios") {
        edit(target, "bios", |bios| {
            set_absent(bios, "useSerial", preferred.preferred_use_bios_serial);
        });
    }
    if let Some(efi) = preferred.preferred_efi.as_ref().filter(|_| !has_loader(target)) {
        target.insert("efi".to_owned(), efi.clone());
        return;
    }
    if preferred.preferred_use_efi == Some(true) && !has_loader(target) {
        target.insert("efi".to_owned(), empty());
    }
    if is_given(target, "efi") {
        edit(target, "efi", |efi| {
            set_absent(efi, "secureBoot", preferred.preferred_use_secure_boot);
        });
    }
}

fn clock(target: &mut Object, preferred: &ClockPreferences) {
    if let Some(offset) = &preferred.preferred_clock_offset {
        // An offset is taken whole or not at all.
        if !is_given(target, "utc") && !is_given(target, "timezone") {
            for name in ["utc", "timezone"] {
                set(target, name, offset.get(name).cloned());
            }
        }
    }
    set_absent(target, "timer", preferred.preferred_timer.clone());
}
