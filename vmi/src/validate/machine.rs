//! Rules on firmware, machine, names, strategies and probes.

use uuid::Uuid;

use super::limits::image_path_fault;
use crate::field::FieldError;
use crate::load::Vmi;
use crate::names::{label_fault, subdomain_fault};
use crate::types::{Feature, Firmware, KernelBoot, Probe};

/// Maximum length of the system serial number in characters: the VMM cuts off the rest.
const SERIAL: usize = 256;

pub(super) fn check(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    firmware(vmi, &vmi.spec.domain.firmware, errors);
    names(vmi, errors);
    strategies(vmi, errors);
    inputs(vmi, errors);
    probe(vmi, "readinessProbe", vmi.spec.readiness_probe.as_ref(), errors);
    probe(vmi, "livenessProbe", vmi.spec.liveness_probe.as_ref(), errors);
    annotations(vmi, errors);
}

fn firmware(vmi: &Vmi, firmware: &Firmware, errors: &mut Vec<FieldError>) {
    if let Some(uuid) = firmware.uuid.as_deref().filter(|uuid| !uuid.is_empty())
        && Uuid::parse_str(uuid).is_err()
    {
        let path = vmi.at("domain.firmware.uuid");
        errors.push(FieldError::invalid(
            &path,
            format!("{path} '{uuid}' is not a UUID"),
        ));
    }
    if let Some(bootloader) = &firmware.bootloader {
        if bootloader.efi.is_some() && bootloader.bios.is_some() {
            let path = vmi.at("domain.firmware.bootloader");
            let text = format!("{path} has both EFI and BIOS configured, but they are mutually exclusive.");
            errors.push(FieldError::invalid(path, text));
        }
        let smm = vmi.spec.domain.features.smm.as_ref().is_some_and(Feature::is_on);
        if bootloader
            .efi
            .as_ref()
            .is_some_and(|efi| efi.secure_boot.unwrap_or(true))
            && !smm
        {
            let path = vmi.at("domain");
            let text = format!(
                "{path} has EFI SecureBoot enabled. SecureBoot requires SMM, which is currently disabled."
            );
            errors.push(FieldError::invalid(path, text));
        }
    }
    // KubeVirt takes any text: the serial numbers of migrated VMs have spaces.
    let serial = firmware.serial.as_deref().unwrap_or_default();
    if serial.chars().count() > SERIAL || serial.contains(char::is_control) {
        let path = vmi.at("domain.firmware.serial");
        let text = format!("{path} must have at most {SERIAL} characters, none of them a control character");
        errors.push(FieldError::invalid(path, text));
    }
    if let Some(boot) = &firmware.kernel_boot {
        kernel_boot(boot, &vmi.at("domain.firmware.kernelBoot"), errors);
    }
}

fn kernel_boot(boot: &KernelBoot, path: &str, errors: &mut Vec<FieldError>) {
    let Some(container) = &boot.container else {
        if boot
            .kernel_args
            .as_deref()
            .is_some_and(|arguments| !arguments.is_empty())
        {
            let text = "kernel arguments cannot be provided without an external kernel";
            errors.push(FieldError::invalid(format!("{path}.kernelArgs"), text));
        }
        return;
    };
    let path = format!("{path}.container");
    if container.image.as_deref().unwrap_or_default().is_empty() {
        errors.push(FieldError::required(
            format!("{path}.image"),
            format!("{path} must be defined with an image"),
        ));
    }
    let kernel = container.kernel_path.as_deref().unwrap_or_default();
    let initrd = container.initrd_path.as_deref().unwrap_or_default();
    if kernel.is_empty() && initrd.is_empty() {
        let text =
            format!("{path} must be defined with at least one of the following: kernelPath, initrdPath");
        errors.push(FieldError::required(&path, text));
    }
    for (name, file) in [("kernelPath", kernel), ("initrdPath", initrd)] {
        if let Some(fault) = Some(file)
            .filter(|file| !file.is_empty())
            .and_then(image_path_fault)
        {
            let path = format!("{path}.{name}");
            errors.push(FieldError::invalid(&path, format!("{path} {fault}")));
        }
    }
}

fn names(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let machine = &vmi.spec.domain.machine.machine_type;
    if !(machine.is_empty() || machine.starts_with("q35") || machine.starts_with("pc-q35")) {
        let path = vmi.at("domain.machine.type");
        let text = format!("{path} is not supported: {machine} (allowed values: [q35* pc-q35*])");
        errors.push(FieldError::invalid(path, text));
    }
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    if let Some(fault) = given(&vmi.spec.hostname).and_then(|name| label_fault(&name)) {
        let path = vmi.at("hostname");
        let text = format!("{path} does not conform to the kubernetes DNS_LABEL rules : {fault}");
        errors.push(FieldError::invalid(path, text));
    }
    if let Some(fault) = given(&vmi.spec.subdomain).and_then(|name| subdomain_fault(&name)) {
        let path = vmi.at("subdomain");
        let text = format!("{path} does not conform to the kubernetes DNS_SUBDOMAIN rules : {fault}");
        errors.push(FieldError::invalid(path, text));
    }
}

fn strategies(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let spec = &vmi.spec;
    if let Some(policy) = spec.domain.io_threads_policy.as_deref()
        && !matches!(policy, "shared" | "auto" | "supplementalPool")
    {
        let text = format!("Invalid IOThreadsPolicy ({policy})");
        errors.push(FieldError::invalid(vmi.at("domain.ioThreadsPolicy"), text));
    }
    if let Some(strategy) = spec.eviction_strategy.as_deref()
        && !matches!(
            strategy,
            "LiveMigrate" | "LiveMigrateIfPossible" | "None" | "External"
        )
    {
        let path = vmi.at("evictionStrategy");
        let text = format!("{path} is set with an unrecognized option: {strategy}");
        errors.push(FieldError::invalid(path, text));
    }
    let Some(strategy) = spec.start_strategy.as_deref() else {
        return;
    };
    let path = vmi.at("startStrategy");
    if strategy != "Paused" {
        let text = format!("{path} is set with an unrecognized option: {strategy}");
        errors.push(FieldError::invalid(path, text));
    } else if spec.liveness_probe.is_some() {
        let text = format!(
            "either {path} or {} should be provided.Pausing VMI with LivenessProbe is not supported",
            vmi.at("livenessProbe")
        );
        errors.push(FieldError::invalid(path, text));
    }
}

fn inputs(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    for (i, input) in vmi.spec.domain.devices.inputs.iter().enumerate() {
        let path = vmi.at(&format!("domain.devices.inputs[{i}]"));
        if !matches!(input.bus.as_deref().unwrap_or_default(), "" | "virtio" | "usb") {
            let text = "Input device can have only virtio or usb bus.";
            errors.push(FieldError::invalid(format!("{path}.bus"), text));
        }
        if input.input_type != "tablet" {
            let text = "Input device can have only tablet type.";
            errors.push(FieldError::invalid(format!("{path}.type"), text));
        }
    }
}

fn probe(vmi: &Vmi, name: &str, probe: Option<&Probe>, errors: &mut Vec<FieldError>) {
    let Some(probe) = probe else { return };
    let path = vmi.at(name);
    let kinds = [
        &probe.guest_agent_ping,
        &probe.exec,
        &probe.http_get,
        &probe.tcp_socket,
    ];
    match kinds.into_iter().filter(|kind| kind.is_some()).count() {
        0 => {
            let text = format!(
                "either {path}.tcpSocket, {path}.exec or {path}.httpGet must be set if a {path} is specified"
            );
            errors.push(FieldError::required(&path, text));
        }
        1 => {}
        _ => errors.push(FieldError::invalid(
            &path,
            format!("{path} must have exactly one probe type set"),
        )),
    }
    if vmi.has_pod_network() {
        return;
    }
    for (kind, given) in [("httpGet", &probe.http_get), ("tcpSocket", &probe.tcp_socket)] {
        if given.is_some() {
            let path = format!("{path}.{kind}");
            errors.push(FieldError::invalid(
                &path,
                format!("{path} is only allowed if the Pod Network is attached"),
            ));
        }
    }
}

fn annotations(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let gates = [
        ("hooks.kubevirt.io/hookSidecars", "sidecar"),
        ("kubevirt.io/ignitiondata", "ExperimentalIgnitionSupport"),
    ];
    for (key, gate) in gates
        .into_iter()
        .filter(|(key, _)| vmi.annotations.contains_key(*key))
    {
        let path = vmi.metadata_at("annotations");
        let text =
            format!("{gate} feature gate is not enabled in kubevirt-config, invalid entry {path}.{key}");
        errors.push(FieldError::invalid(path, text));
    }
}
