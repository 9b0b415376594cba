//! Support that depends on the value of a field; the schema table covers fields that are never supported.

mod disks;
mod network;

use crate::field::{FieldError, Warning};
use crate::load::Vmi;
use crate::plan::WatchdogAction;
use crate::schema::Diagnostics;
use crate::types::Feature;

/// Reports unsupported values and warnings.
pub(crate) fn support(vmi: &Vmi) -> Diagnostics {
    let mut found = Diagnostics::default();
    machine(vmi, &mut found);
    disks::support(vmi, &mut found);
    network::support(vmi, &mut found);
    found
}

fn machine(vmi: &Vmi, found: &mut Diagnostics) {
    let domain = &vmi.spec.domain;
    let architecture = vmi.spec.architecture.as_deref().unwrap_or_default();
    if !matches!(architecture, "" | "amd64") {
        let path = vmi.at("architecture");
        let text = format!("{path} '{architecture}' is not supported: only amd64 is supported");
        found.unsupported.push(FieldError::unsupported(path, text));
    }
    if !domain.machine.machine_type.is_empty() {
        let text = "is ignored: the machine type is Husk's own, with PCI Express and ACPI but without the q35 chipset";
        found
            .warnings
            .push(Warning::new(vmi.at("domain.machine.type"), text));
    }
    let model = domain.cpu.model.as_deref().unwrap_or_default();
    if !matches!(model, "" | "host-model" | "host-passthrough") {
        let text = format!("'{model}' is ignored; the guest gets the model of the host CPU");
        found
            .warnings
            .push(Warning::new(vmi.at("domain.cpu.model"), text));
    }
    if domain.features.acpi.as_ref().is_some_and(|acpi| !acpi.is_on()) {
        let text = "the guest still gets ACPI tables, but `husk stop` kills it immediately, without pressing the power button";
        let path = vmi.at("domain.features.acpi.enabled");
        found.warnings.push(Warning::new(path, text));
    }
    if domain.features.apic.as_ref().is_some_and(|apic| !apic.is_on()) {
        let text = "a machine without APIC is not supported";
        found.unsupported.push(FieldError::unsupported(
            vmi.at("domain.features.apic.enabled"),
            text,
        ));
    }
    if domain.features.smm.as_ref().is_some_and(Feature::is_on) {
        let text = "is ignored: Husk runs no firmware that needs SMM";
        found
            .warnings
            .push(Warning::new(vmi.at("domain.features.smm"), text));
    }
    if let Some(efi) = domain
        .firmware
        .bootloader
        .as_ref()
        .and_then(|bootloader| bootloader.efi.as_ref())
    {
        if efi.secure_boot.unwrap_or(true) {
            let text =
                "secure boot is not supported, since Husk runs no UEFI firmware; set secureBoot to false";
            let path = vmi.at("domain.firmware.bootloader.efi.secureBoot");
            found.unsupported.push(FieldError::unsupported(path, text));
        } else {
            let text =
                "is ignored: Husk runs no UEFI firmware and boots the kernel in the disk image directly";
            found
                .warnings
                .push(Warning::new(vmi.at("domain.firmware.bootloader.efi"), text));
        }
    }
    match domain.reboot_policy.as_deref().unwrap_or_default() {
        "" | "Reboot" => {}
        policy => {
            let path = vmi.at("domain.rebootPolicy");
            let text = format!(
                "{path} '{policy}' is not supported; a reboot of the guest restarts it in the same VM"
            );
            found.unsupported.push(FieldError::unsupported(path, text));
        }
    }
    let action = domain
        .devices
        .watchdog
        .as_ref()
        .and_then(|watchdog| watchdog.i6300esb.action.as_deref());
    if let Some(action) = action.filter(|action| WatchdogAction::named(action).is_none()) {
        let path = vmi.at("domain.devices.watchdog.i6300esb.action");
        let text = format!("{path} '{action}' is not supported: use reset, poweroff, shutdown or pause");
        found.unsupported.push(FieldError::unsupported(path, text));
    }
    if domain.devices.tpm.as_ref().is_some_and(Feature::is_on) {
        let text = "a TPM is not supported; set enabled to false if a preference gives one";
        let path = vmi.at("domain.devices.tpm");
        found.unsupported.push(FieldError::unsupported(path, text));
    }
    if domain.devices.log_serial_console == Some(false) {
        let text = "the output of the serial console is kept for `husk logs` nevertheless";
        found
            .warnings
            .push(Warning::new(vmi.at("domain.devices.logSerialConsole"), text));
    }
    if vmi
        .annotations
        .contains_key("smbios.vm.kubevirt.io/baseBoardManufacturer")
    {
        let path = format!(
            "{}.smbios.vm.kubevirt.io/baseBoardManufacturer",
            vmi.metadata_at("annotations")
        );
        found
            .warnings
            .push(Warning::new(path, "is ignored: hook sidecars are not supported"));
    }
}
