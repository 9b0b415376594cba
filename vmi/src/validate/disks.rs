//! Rules on disks.

use std::collections::{HashMap, HashSet};

use crate::field::FieldError;
use crate::load::Vmi;
use crate::names::{is_pci_address, is_serial, label_fault};
use crate::types::{BlockSize, Disk};

/// Maximum length of a serial number in characters.
const SERIAL: usize = 256;

pub(super) fn check(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let list = vmi.at("domain.devices.disks");
    let disks = &vmi.spec.domain.devices.disks;
    let mut names = HashMap::new();
    let mut orders = HashSet::new();
    for (i, disk) in disks.iter().enumerate() {
        let path = format!("{list}[{i}]");
        if let Some(other) = names.insert(disk.name.as_str(), i) {
            let text = format!("{path} and {list}[{other}] must not have the same Name.");
            errors.push(FieldError::invalid(format!("{path}.name"), text));
        }
        // Newer versions of KubeVirt allow an empty CD-ROM drive.
        if vmi.spec.volume(&disk.name).is_none() && disk.target().0 != "cdrom" {
            let text = format!("{path}.Name '{}' not found.", disk.name);
            errors.push(FieldError::invalid(format!("{path}.name"), text));
        }
        if let Some(fault) = label_fault(&disk.name) {
            errors.push(FieldError::invalid(format!("{path}.name"), fault));
        }
        boot_order(disk.boot_order, &path, &mut orders, errors);
        target(vmi, disk, &path, errors);
        metrics(vmi, disk, &path, errors);
        settings(disk, &path, errors);
    }
    for (i, interface) in vmi.spec.domain.devices.interfaces.iter().enumerate() {
        let path = vmi.at(&format!("domain.devices.interfaces[{i}]"));
        boot_order(interface.boot_order, &path, &mut orders, errors);
    }
    // A volume without a disk gets one of the same name.
    for (i, volume) in vmi.spec.volumes.iter().enumerate() {
        if let Some(fault) = label_fault(&volume.name).filter(|_| !names.contains_key(volume.name.as_str())) {
            errors.push(FieldError::invalid(vmi.at(&format!("volumes[{i}].name")), fault));
        }
    }
}

fn boot_order(order: Option<i64>, path: &str, orders: &mut HashSet<i64>, errors: &mut Vec<FieldError>) {
    let Some(order) = order else { return };
    let field = format!("{path}.bootOrder");
    if order < 1 {
        errors.push(FieldError::invalid(
            field,
            format!("{path} must have a boot order > 0, if supplied"),
        ));
    } else if !orders.insert(order) {
        let text = format!("Boot order for {field} already set for a different device.");
        errors.push(FieldError::invalid(field, text));
    }
}

/// Rules on the disk of a volume of downward metrics.
fn metrics(vmi: &Vmi, disk: &Disk, path: &str, errors: &mut Vec<FieldError>) {
    let volume = vmi.spec.volume(&disk.name);
    if volume.is_none_or(|volume| volume.downward_metrics.is_none()) {
        return;
    }
    let (kind, target) = disk.target();
    let bus = target
        .and_then(|target| target.bus.as_deref())
        .unwrap_or_default();
    let field = format!("{path}.disk");
    if kind != "disk" {
        let text =
            format!("DownwardMetrics volume must be mapped to a disk, but disk is not set on {field}.");
        errors.push(FieldError::required(field, text));
    } else if !matches!(bus, "" | "virtio") {
        let field = format!("{field}.bus");
        let text =
            format!("DownwardMetrics volume must be mapped to virtio bus, but {field} is set to {bus}");
        errors.push(FieldError::invalid(field, text));
    }
}

fn target(vmi: &Vmi, disk: &Disk, path: &str, errors: &mut Vec<FieldError>) {
    let targets = [("disk", &disk.disk), ("lun", &disk.lun), ("cdrom", &disk.cdrom)];
    if targets.iter().filter(|(_, target)| target.is_some()).count() > 1 {
        errors.push(FieldError::invalid(
            path,
            format!("{path} can only have a single target type defined"),
        ));
    }
    for (kind, target) in targets {
        let Some(target) = target else { continue };
        let bus = target.bus.as_deref().unwrap_or_default();
        let field = format!("{path}.{kind}.bus");
        match bus {
            "ide" => errors.push(FieldError::invalid(field, "IDE bus is not supported")),
            "virtio" if kind == "cdrom" => {
                errors.push(FieldError::invalid(
                    field,
                    "Bus type virtio is invalid for CD-ROM device",
                ));
            }
            // The default bus, which KubeVirt sets before it applies its rules.
            "" | "sata" if kind == "disk" && target.readonly == Some(true) => {
                errors.push(FieldError::invalid(
                    field,
                    "sata hard-disks do not support read-only.",
                ));
            }
            "" | "virtio" | "scsi" | "sata" | "usb" => {}
            _ => {
                let text = format!(
                    "{path} is set with an unrecognized bus {bus}, must be one of: [virtio scsi sata usb]"
                );
                errors.push(FieldError::invalid(field, text));
            }
        }
        if let Some(address) = target
            .pci_address
            .as_deref()
            .filter(|address| !address.is_empty())
        {
            pci_address(address, bus, &format!("{path}.{kind}.pciAddress"), errors);
        }
    }
    if disk.target().0 == "disk" && disk.bus() == "sata" && disk.dedicated_io_thread {
        errors.push(FieldError::unsupported(
            path,
            "IOThreads are not supported for disks on a SATA bus",
        ));
    }
    let volume = vmi.spec.volume(&disk.name);
    if disk.lun.is_some()
        && volume.is_some_and(|v| v.persistent_volume_claim.is_none() && v.data_volume.is_none())
    {
        let field = format!("{path}.lun");
        let text = format!("{field} can only be mapped to a DataVolume or PersistentVolumeClaim volume.");
        errors.push(FieldError::invalid(field, text));
    }
}

fn pci_address(address: &str, bus: &str, field: &str, errors: &mut Vec<FieldError>) {
    if bus != "virtio" {
        let text = format!("disk {field} - setting a PCI address is only possible with bus type virtio.");
        errors.push(FieldError::invalid(field, text));
    }
    if !is_pci_address(address) {
        let text = format!("disk {field} has malformed PCI address ({address}).");
        errors.push(FieldError::invalid(field, text));
    }
}

fn settings(disk: &Disk, path: &str, errors: &mut Vec<FieldError>) {
    let serial = disk.serial.as_deref().unwrap_or_default();
    let field = format!("{path}.serial");
    if !is_serial(serial) {
        let text =
            format!("{path} must be made up of the following characters [A-Za-z0-9_.+-], if specified");
        errors.push(FieldError::invalid(&field, text));
    }
    if serial.len() > SERIAL {
        let text = format!("{path} must be less than or equal to {SERIAL} in length, if specified");
        errors.push(FieldError::invalid(&field, text));
    }
    if let Some(cache) = disk.cache.as_deref()
        && !matches!(cache, "" | "none" | "writethrough" | "writeback")
    {
        let field = format!("{path}.cache");
        let text = format!("{field} has invalid value {cache}");
        errors.push(FieldError::invalid(field, text));
    }
    if let Some(io) = disk.io.as_deref()
        && !matches!(io, "" | "native" | "threads")
    {
        let field = format!("{path}.io");
        let text =
            format!("Disk IO mode for {field} is not supported. Supported modes are: native, threads.");
        errors.push(FieldError::unsupported(field, text));
    }
    if let Some(policy) = disk.error_policy.as_deref()
        && !matches!(policy, "stop" | "ignore" | "report" | "enospace")
    {
        let field = format!("{path}.errorPolicy");
        let text = format!("{field} has invalid value \"{policy}\"");
        errors.push(FieldError::invalid(field, text));
    }
    if let Some(size) = &disk.block_size {
        block_size(size, &format!("{path}.blockSize"), errors);
    }
}

fn block_size(size: &BlockSize, path: &str, errors: &mut Vec<FieldError>) {
    let Some(custom) = &size.custom else { return };
    if size
        .match_volume
        .as_ref()
        .is_some_and(crate::types::Feature::is_on)
    {
        let text = "Block size matching can't be enabled together with a custom value";
        errors.push(FieldError::invalid(path, text));
        return;
    }
    let (logical, physical) = (custom.logical, custom.physical);
    if logical > physical {
        let text =
            format!("Logical size {logical} must be the same or less than the physical size of {physical}");
        errors.push(FieldError::invalid(format!("{path}.custom.logical"), text));
    }
    for (name, size) in [("logical", logical), ("physical", physical)] {
        let fault = match size {
            i64::MIN..512 => "less than the supported minimum size of 512",
            0x20_0001.. => "greater than the supported maximum size of 2 MiB",
            _ if size & (size - 1) != 0 => "not a power of 2",
            _ => continue,
        };
        let text = format!("Provided size of {size} is {fault}");
        errors.push(FieldError::invalid(format!("{path}.custom.{name}"), text));
    }
}
