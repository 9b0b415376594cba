//! What is supported where a field's value decides; where the field alone does, the schema table says so.

mod disks;
mod network;

use crate::field::{FieldError, Note};
use crate::load::Vmi;
use crate::schema::Findings;

/// Says which valid values are refused and which are met differently.
pub(crate) fn support(vmi: &Vmi) -> Findings {
    let mut found = Findings::default();
    machine(vmi, &mut found);
    disks::support(vmi, &mut found);
    network::support(vmi, &mut found);
    found
}

fn machine(vmi: &Vmi, found: &mut Findings) {
    let domain = &vmi.spec.domain;
    let architecture = vmi.spec.architecture.as_deref().unwrap_or_default();
    if !matches!(architecture, "" | "amd64") {
        let path = vmi.at("architecture");
        let text = format!("{path} '{architecture}' is not supported; amd64 is");
        found.unsupported.push(FieldError::unsupported(path, text));
    }
    if !domain.machine.machine_type.is_empty() {
        let text = "the machine is Husk's own: PCI Express and ACPI, without q35's chipset";
        found.notes.push(Note::new(vmi.at("domain.machine.type"), text));
    }
    let model = domain.cpu.model.as_deref().unwrap_or_default();
    if !matches!(model, "" | "host-model" | "host-passthrough") {
        let text = format!("'{model}' is not emulated; the guest sees the host's CPU");
        found.notes.push(Note::new(vmi.at("domain.cpu.model"), text));
    }
    if domain.features.acpi.as_ref().is_some_and(|acpi| !acpi.is_on()) {
        let text =
            "the guest is given ACPI tables all the same; a stop kills it at once, without the power button";
        let path = vmi.at("domain.features.acpi.enabled");
        found.notes.push(Note::new(path, text));
    }
    if domain.features.apic.as_ref().is_some_and(|apic| !apic.is_on()) {
        let text = "a machine without APIC is not supported";
        found.unsupported.push(FieldError::unsupported(
            vmi.at("domain.features.apic.enabled"),
            text,
        ));
    }
    if domain
        .features
        .smm
        .as_ref()
        .is_some_and(crate::types::Feature::is_on)
    {
        let text = "no firmware runs, so there is nothing for SMM to protect";
        found.notes.push(Note::new(vmi.at("domain.features.smm"), text));
    }
    if let Some(efi) = domain
        .firmware
        .bootloader
        .as_ref()
        .and_then(|bootloader| bootloader.efi.as_ref())
    {
        if efi.secure_boot.unwrap_or(true) {
            let text =
                "secure boot is not supported, and is on unless secureBoot is false: no UEFI firmware runs";
            let path = vmi.at("domain.firmware.bootloader.efi.secureBoot");
            found.unsupported.push(FieldError::unsupported(path, text));
        } else {
            let text = "no UEFI firmware runs: the kernel in the disk image is started directly";
            found
                .notes
                .push(Note::new(vmi.at("domain.firmware.bootloader.efi"), text));
        }
    }
    match domain.reboot_policy.as_deref().unwrap_or_default() {
        "" | "Reboot" => {}
        policy => {
            let path = vmi.at("domain.rebootPolicy");
            let text =
                format!("{path} '{policy}' is not supported; a guest's reboot starts it again in place");
            found.unsupported.push(FieldError::unsupported(path, text));
        }
    }
    if domain.devices.log_serial_console == Some(false) {
        let text = "the serial console's output is always kept for husk logs";
        found
            .notes
            .push(Note::new(vmi.at("domain.devices.logSerialConsole"), text));
    }
    if vmi
        .annotations
        .contains_key("smbios.vm.kubevirt.io/baseBoardManufacturer")
    {
        let path = format!(
            "{}.smbios.vm.kubevirt.io/baseBoardManufacturer",
            vmi.metadata_at("annotations")
        );
        found.notes.push(Note::new(
            path,
            "is read by a hook sidecar, which does not run here",
        ));
    }
}
