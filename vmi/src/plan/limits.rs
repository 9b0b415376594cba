//! Limits that hold for any plan of a VMI, independent of the resources of the caller.

use uuid::Uuid;

use super::disks::{self, effective_disks};
use super::types::PodResources;
use super::volume_source::VolumeContext;
use super::{machine, nics};
use crate::field::FieldError;
use crate::load::Vmi;

/// Number of PCI slots, each with one function, without the host bridge.
const FUNCTIONS: usize = 31;

/// Checks the limits of vCPUs and memory.
pub(crate) fn check_sizes(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    machine::topology(vmi, errors);
    machine::memory(vmi, errors);
}

/// Checks all other limits.
pub(crate) fn check_limits(vmi: &Vmi) -> Vec<FieldError> {
    let mut errors = Vec::new();
    machine::rtc_offset(vmi, 0, &mut errors);
    functions(vmi, &mut errors);
    for (index, disk) in effective_disks(vmi).iter().enumerate() {
        let path = vmi.at(&format!("domain.devices.disks[{index}]"));
        errors.extend(disks::cache(disk, &path).err());
    }
    let resources = PodResources::default();
    for (index, volume) in vmi.spec.volumes.iter().enumerate() {
        let context = VolumeContext {
            vmi,
            uuid: Uuid::nil(),
            resources: &resources,
            path: vmi.at(&format!("volumes[{index}]")),
        };
        errors.extend(context.check(volume).err());
    }
    errors
}

/// Checks the number of PCI slots: each interface and each virtio disk needs one; the SCSI controller needs one for any
/// number of disks, and the console and vsock devices one each.
fn functions(vmi: &Vmi, errors: &mut Vec<FieldError>) {
    let devices = &vmi.spec.domain.devices;
    let balloon = devices.autoattach_mem_balloon.unwrap_or(true);
    let asked_for = [devices.rng.is_some(), balloon, devices.watchdog.is_some()];
    let others = 3 + asked_for.iter().filter(|asked| **asked).count();
    let (interfaces, most) = (nics::effective_interfaces(vmi).len(), FUNCTIONS - others);
    if interfaces > most {
        let path = vmi.at("domain.devices.interfaces");
        let text = format!("{path} has {interfaces} interfaces; a VM with these devices has at most {most}");
        errors.push(FieldError::invalid(path, text));
    }
    let (disks, most) = (effective_disks(vmi), most.saturating_sub(interfaces));
    let virtio = disks.iter().filter(|disk| disk.is_virtio_blk()).count();
    if virtio > most {
        let path = vmi.at("domain.devices.disks");
        let text = format!(
            "{path} has {virtio} disks on bus virtio, but a VM with these devices has at most {most}; use bus scsi for more"
        );
        errors.push(FieldError::invalid(path, text));
    }
}
