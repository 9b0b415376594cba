//! The kernel that a plan boots.

use super::disk::{DeviceType, DiskPlan, DiskSource};
use super::types::{BootPlan, FileRef, KernelFile, KernelOverride, PodResources};
use super::volume_source::{KERNEL_VOLUME, relative};
use crate::field::{FieldError, Warning};
use crate::load::Vmi;
use crate::types::KernelBoot;

/// Maximum command line of an x86 kernel in bytes, without the terminating NUL.
const COMMAND_LINE: usize = 2047;

/// Chooses the kernel: that of the caller, else that of the manifest, else that of the disks.
pub(super) fn plan(
    vmi: &Vmi,
    disks: &[DiskPlan],
    resources: &PodResources,
    errors: &mut Vec<FieldError>,
    warnings: &mut Vec<Warning>,
) -> BootPlan {
    let given = resources.kernel.clone().unwrap_or_default();
    let kernel_boot = vmi
        .spec
        .domain
        .firmware
        .kernel_boot
        .as_ref()
        .filter(|boot| boot.container.is_some());
    if given.kernel.is_some() || kernel_boot.is_some() {
        for path in interface_boot_orders(vmi) {
            warnings.push(Warning::new(
                path,
                "is ignored: booting from the network is not supported; the kernel is booted",
            ));
        }
    }
    let boot = match (given.kernel.clone(), kernel_boot) {
        (Some(kernel), manifest) => {
            if manifest.is_some() {
                warnings.push(Warning::new(
                    vmi.at("domain.firmware.kernelBoot"),
                    "is overridden by --kernel",
                ));
            }
            BootPlan::Kernel {
                kernel: KernelFile::Path(kernel),
                initrd: given.initrd.map(KernelFile::Path),
                command_line: given.append.unwrap_or_default(),
                append: None,
            }
        }
        (None, Some(manifest)) => from_manifest(vmi, manifest, given, resources, errors),
        (None, None) => {
            if given.initrd.is_some() {
                let path = vmi.at("domain.firmware.kernelBoot");
                errors.push(FieldError::required(path, "--initrd requires --kernel"));
            }
            from_disks(vmi, disks, given.append, errors, warnings)
        }
    };
    if let BootPlan::Kernel { command_line, .. }
    | BootPlan::Disks {
        append: Some(command_line),
        ..
    } = &boot
        && (command_line.len() > COMMAND_LINE || command_line.contains('\0'))
    {
        let path = vmi.at("domain.firmware.kernelBoot.kernelArgs");
        let text = format!("the command line must have at most {COMMAND_LINE} bytes and no NUL");
        errors.push(FieldError::invalid(path, text));
    }
    boot
}

fn from_manifest(
    vmi: &Vmi,
    boot: &KernelBoot,
    given: KernelOverride,
    resources: &PodResources,
    errors: &mut Vec<FieldError>,
) -> BootPlan {
    let path = vmi.at("domain.firmware.kernelBoot.container");
    let dir = resources.volumes.get(KERNEL_VOLUME).cloned();
    if dir.is_none() {
        let text = format!(
            "{path} needs the files of the image; pass a directory with them: --volume {KERNEL_VOLUME}=DIR"
        );
        errors.push(FieldError::required(&path, text));
    }
    let dir = dir.unwrap_or_default();
    let file = |path: Option<&str>| {
        let path = path.filter(|path| !path.is_empty())?;
        Some(KernelFile::Beneath(FileRef {
            dir: dir.clone(),
            path: relative(path),
        }))
    };
    let container = boot.container.as_ref();
    let kernel = file(container.and_then(|c| c.kernel_path.as_deref())).unwrap_or_else(|| {
        let path = format!("{path}.kernelPath");
        errors.push(FieldError::required(
            &path,
            format!("{path} is required: an initrd alone cannot be booted"),
        ));
        KernelFile::Path(dir.clone())
    });
    let initrd = given.initrd.map(KernelFile::Path);
    let arguments = [boot.kernel_args.clone(), given.append.clone()];
    let arguments: Vec<String> = arguments
        .into_iter()
        .flatten()
        .filter(|text| !text.is_empty())
        .collect();
    BootPlan::Kernel {
        kernel,
        initrd: initrd.or_else(|| file(container.and_then(|c| c.initrd_path.as_deref()))),
        command_line: arguments.join(" "),
        append: given.append,
    }
}

/// Paths of the boot orders of interfaces.
fn interface_boot_orders(vmi: &Vmi) -> impl Iterator<Item = String> {
    let interfaces = vmi.spec.domain.devices.interfaces.iter().enumerate();
    interfaces
        .filter(|(_, interface)| interface.boot_order.is_some())
        .map(|(i, _)| vmi.at(&format!("domain.devices.interfaces[{i}].bootOrder")))
}

/// The disks with a boot order, in that order. If there are none, the first that is no CD-ROM, as with libvirt, else the
/// first. Empty CD-ROM drives are skipped.
fn from_disks(
    vmi: &Vmi,
    disks: &[DiskPlan],
    append: Option<String>,
    errors: &mut Vec<FieldError>,
    warnings: &mut Vec<Warning>,
) -> BootPlan {
    let loaded = || disks.iter().filter(|disk| disk.source != DiskSource::Empty);
    let mut ordered: Vec<&DiskPlan> = loaded().filter(|disk| disk.boot_order.is_some()).collect();
    ordered.sort_by_key(|disk| disk.boot_order);
    for path in interface_boot_orders(vmi) {
        if ordered.is_empty() {
            errors.push(FieldError::unsupported(
                &path,
                "booting from the network is not supported; boot a disk or a kernel",
            ));
        } else {
            warnings.push(Warning::new(
                path,
                "is ignored: booting from the network is not supported; the disks are tried",
            ));
        }
    }
    if ordered.is_empty() {
        let first = loaded().find(|disk| !matches!(disk.device, DeviceType::Cdrom { .. }));
        ordered.extend(first.or_else(|| loaded().next()));
    }
    if ordered.is_empty() && errors.is_empty() {
        let path = vmi.at("domain.devices.disks");
        let text = format!("{path} has no disk to boot from: add one, firmware.kernelBoot or --kernel");
        errors.push(FieldError::required(path, text));
    }
    BootPlan::Disks {
        order: ordered.into_iter().map(|disk| disk.name.clone()).collect(),
        append,
    }
}
