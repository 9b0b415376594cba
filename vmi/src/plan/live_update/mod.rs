//! What of a VMI can be made true of a VM that runs, and what would take a restart.

use std::collections::HashSet;

use super::build::plan;
use super::disk::{DiskPlan, DiskSource, SeedData};
use super::disks::{block_size, cache, effective_disks, error_policy};
use super::hotplug::NewVolume;
use super::nic::{NicNetwork, NicPlan};
use super::nics;
use super::types::{BootPlan, FileRef, KernelFile, KernelOverride, PodResources, VmPlan};
use super::volume_source::KERNEL_VOLUME;
use crate::field::FieldError;
use crate::load::Vmi;
use crate::types::{Disk, Volume};
use crate::validate::validate;

/// What a VMI wants of a VM that runs, as far as that can be had without a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveUpdate {
    /// Volumes that were not there at the start, in the manifest's order. Where their data is, the manifest does not
    /// know: their source is [`DiskSource::Empty`].
    pub volumes: Vec<NewVolume>,
    /// Every interface that the manifest lists, or implies.
    pub interfaces: Vec<InterfaceUpdate>,
}

/// What becomes of one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InterfaceUpdate {
    /// It was there at the start; its cable is plugged in, or not.
    Planned {
        /// Its name.
        name: String,
        /// Whether the guest finds the cable plugged in.
        link_up: bool,
    },
    /// It was not, and is to be there.
    Added(Box<NicPlan>),
    /// The guest shall have no device for it (`state: absent`).
    Absent {
        /// Its name.
        name: String,
        /// It was there at the start.
        planned: bool,
    },
}

impl VmPlan {
    /// Compares a VMI with the plan that a VM was started from, in which nothing has been plugged.
    ///
    /// # Errors
    /// All that [`plan`](crate::plan()) refuses; then each field that differs and cannot be changed while the VM runs.
    pub fn live(&self, vmi: &Vmi) -> Result<LiveUpdate, Vec<FieldError>> {
        validate(vmi)?;
        let mut changes = Changes::new(vmi);
        changes.compare("metadata.name", "the VM", &self.name, &vmi.name);
        changes.compare(
            "metadata.namespace",
            "the VM's namespace",
            &self.namespace,
            &vmi.namespace,
        );
        if let (Some(own), Some(other)) = (&self.uid, &vmi.uid) {
            changes.compare("metadata.uid", "the VM's UID", own, other);
        }
        // Of another VM nothing else is of interest.
        changes.end()?;

        let hot = |volume: &Volume| volume.is_hotpluggable() && self.disk(&volume.name).is_none();
        let mut kept = vmi.clone();
        kept.spec.volumes.retain(|volume| !hot(volume));
        let disks = &mut kept.spec.domain.devices.disks;
        disks.retain(|disk| !vmi.spec.volume(&disk.name).is_some_and(hot));
        let mut changes = Changes::new(vmi);
        // A volume that could only have been there at the start has no data here, which its plan would miss.
        let fixed = |volume: &Volume| self.disk(&volume.name).is_some();
        for (i, volume) in vmi.spec.volumes.iter().enumerate() {
            let filesystem = vmi
                .spec
                .domain
                .devices
                .filesystems
                .iter()
                .any(|f| f.name == volume.name);
            if !hot(volume) && !fixed(volume) && !filesystem {
                changes.add(
                    &vmi.at(&format!("volumes[{i}]")),
                    format!(
                        "the volume {:?} was not there when the VM started, and is not hotpluggable: restart the VM",
                        volume.name
                    ),
                );
            }
        }
        changes.end()?;
        let wanted = plan(&kept, &self.resources(&kept))?;
        let mut changes = Changes::new(vmi);
        self.compare(&wanted, &mut changes);
        let (listed, mut volumes) = (effective_disks(vmi), Vec::new());
        for volume in vmi.spec.volumes.iter().filter(|volume| hot(volume)) {
            if let Some(disk) = listed.iter().find(|disk| disk.name == volume.name) {
                volumes.extend(new_volume(vmi, disk, volume, &mut changes));
            }
        }
        let interfaces = self.interfaces(vmi, &wanted, &mut changes);
        changes.end()?;
        Ok(LiveUpdate { volumes, interfaces })
    }

    fn disk(&self, name: &str) -> Option<&DiskPlan> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// What the VM was made of, as far as a VMI may ask for it again.
    fn resources(&self, vmi: &Vmi) -> PodResources {
        let mut resources = PodResources {
            uuid: self.uuid,
            ..PodResources::default()
        };
        for disk in &self.disks {
            let secret = |data: &SeedData| match data {
                SeedData::Secret(dir) => Some(dir.clone()),
                SeedData::Inline(_) => None,
            };
            let path = match &disk.source {
                DiskSource::File(path)
                | DiskSource::HostDisk { path, .. }
                | DiskSource::ContainerDisk { path, .. } => Some(path.clone()),
                DiskSource::Files { dir, .. } => dir.clone(),
                DiskSource::CloudInit {
                    user_data,
                    network_data,
                    ..
                } => secret(user_data).or_else(|| secret(network_data.as_ref()?)),
                DiskSource::Empty | DiskSource::EmptyDisk { .. } | DiskSource::Descriptor(_) => None,
            };
            if let (Some(path), Some(_)) = (path, vmi.spec.volume(&disk.name)) {
                resources.volumes.insert(disk.name.clone(), path);
            }
        }
        let given = match &self.boot {
            BootPlan::Kernel {
                kernel,
                initrd,
                command_line,
                append,
            } => {
                let kernel = match kernel {
                    KernelFile::Path(kernel) => Some(kernel.clone()),
                    KernelFile::Beneath(FileRef { dir, .. }) => {
                        resources.volumes.insert(KERNEL_VOLUME.to_owned(), dir.clone());
                        None
                    }
                };
                let initrd = match initrd {
                    Some(KernelFile::Path(initrd)) => Some(initrd.clone()),
                    Some(KernelFile::Beneath(_)) | None => None,
                };
                let append = match &kernel {
                    Some(_) => Some(command_line.clone()),
                    None => append.clone(),
                };
                KernelOverride {
                    kernel,
                    initrd,
                    append,
                }
            }
            BootPlan::Disks { append, .. } => KernelOverride {
                append: append.clone(),
                ..KernelOverride::default()
            },
        };
        resources.kernel = Some(given);
        resources
    }

    fn compare(&self, wanted: &VmPlan, changes: &mut Changes<'_>) {
        let field = |name: &str| changes.vmi.at(name);
        let memory = changes.vmi.memory_field();
        let paths = [
            "domain.cpu",
            "domain.memory.hugepages",
            "domain.firmware.uuid",
            "domain.firmware.serial",
            "hostname",
            "subdomain",
            "domain.devices.rng",
            "domain.devices.autoattachMemBalloon",
            "domain.devices.autoattachSerialConsole",
            "domain.devices.disableHotplug",
            "domain.features.acpi",
            "terminationGracePeriodSeconds",
            "domain.firmware.kernelBoot",
        ]
        .map(field);
        let [
            cpu,
            hugepages,
            uuid,
            serial,
            hostname,
            subdomain,
            rng,
            balloon,
            console,
            hotplug,
            acpi,
            grace,
            kernel,
        ] = &paths;
        let vcpus = |plan: &VmPlan| {
            let t = plan.topology;
            format!("{} sockets, {} cores, {} threads", t.sockets, t.cores, t.threads)
        };
        let mib = |plan: &VmPlan| format!("{} bytes", plan.memory.guest_bytes);
        let on = |on: bool| if on { "on" } else { "off" };
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let pages = |plan: &VmPlan| plan.memory.hugepage_bytes.unwrap_or(0);
        changes.compare(cpu, "the topology", vcpus(self), vcpus(wanted));
        changes.compare(&memory, "the memory", mib(self), mib(wanted));
        changes.compare(hugepages, "their size", pages(self), pages(wanted));
        changes.compare(uuid, "the UUID", self.uuid, wanted.uuid);
        changes.compare(
            serial,
            "the serial number",
            text(&self.serial),
            text(&wanted.serial),
        );
        changes.compare(hostname, "the host name", &self.hostname, &wanted.hostname);
        changes.compare(
            subdomain,
            "the subdomain",
            text(&self.subdomain),
            text(&wanted.subdomain),
        );
        changes.compare(rng, "it", on(self.rng), on(wanted.rng));
        changes.compare(balloon, "it", on(self.balloon), on(wanted.balloon));
        changes.compare(console, "it", on(self.serial_console), on(wanted.serial_console));
        changes.compare(
            hotplug,
            "the controller",
            on(self.scsi.is_some()),
            on(wanted.scsi.is_some()),
        );
        changes.compare(acpi, "it", on(self.acpi), on(wanted.acpi));
        changes.compare(
            grace,
            "it",
            self.grace_period_seconds,
            wanted.grace_period_seconds,
        );
        let disks = [&self.boot, &wanted.boot].map(|boot| matches!(boot, BootPlan::Disks { .. }));
        // Which disks are tried is theirs to tell.
        if disks != [true, true] && self.boot != wanted.boot {
            changes.add(
                kernel,
                "the kernel, its initrd and its command line cannot be changed while the VM runs: restart it"
                    .to_owned(),
            );
        }
        self.compare_disks(wanted, changes);
    }

    fn compare_disks(&self, wanted: &VmPlan, changes: &mut Changes<'_>) {
        let list = changes.vmi.at("domain.devices.disks");
        let names =
            |plan: &VmPlan| -> HashSet<String> { plan.disks.iter().map(|d| d.name.clone()).collect() };
        let (own, others) = (names(self), names(wanted));
        for disk in self.disks.iter().filter(|disk| !others.contains(&disk.name)) {
            let text = format!("the disk {:?} is a part of the VM while it runs", disk.name);
            changes.add(&list, text);
        }
        if own != others {
            // What the others are called, and where they are, follows from that.
            return;
        }
        for disk in &wanted.disks {
            if self.disk(&disk.name) != Some(disk) {
                let disks = &changes.vmi.spec.domain.devices.disks;
                let place = disks.iter().position(|given| given.name == disk.name);
                let volume = changes.vmi.spec.volumes.iter().position(|v| v.name == disk.name);
                let field = match (place, volume) {
                    (Some(i), _) => format!("{list}[{i}]"),
                    (None, Some(i)) => changes.vmi.at(&format!("volumes[{i}]")),
                    (None, None) => list.clone(),
                };
                let text = format!(
                    "the disk {:?}, and the volume behind it, cannot be changed while the VM runs: restart it",
                    disk.name
                );
                changes.add(&field, text);
            }
        }
    }

    fn interfaces(&self, vmi: &Vmi, wanted: &VmPlan, changes: &mut Changes<'_>) -> Vec<InterfaceUpdate> {
        let list = vmi.at("domain.devices.interfaces");
        let listed = &vmi.spec.domain.devices.interfaces;
        let field = |name: &str| match listed.iter().position(|interface| interface.name == name) {
            Some(i) => format!("{list}[{i}]"),
            None => list.clone(),
        };
        let own = |name: &str| self.nics.iter().find(|nic| nic.name == name);
        let mut found = Vec::new();
        for nic in &wanted.nics {
            let Some(there) = own(&nic.name) else {
                // A VM without a network was started by somebody who may not make one; it says so when asked for more.
                if nic.network == NicNetwork::Pod && !self.nics.is_empty() {
                    let text = format!(
                        "the interface {:?} of the pod's network was not there when the VM started: restart it",
                        nic.name
                    );
                    changes.add(&field(&nic.name), text);
                }
                found.push(InterfaceUpdate::Added(Box::new(nic.clone())));
                continue;
            };
            let same = NicPlan {
                link_up: there.link_up,
                // One that the manifest does not give is the device's.
                mac: nic.mac.and(there.mac),
                ..nic.clone()
            };
            let mac = nic.mac.is_none() || nic.mac == there.mac;
            let unchanged = NicPlan {
                mac: nic.mac.and(there.mac),
                ..there.clone()
            };
            if !mac || same != unchanged {
                let text = format!(
                    "but for its state, the interface {:?} cannot be changed while the VM runs: restart it",
                    nic.name
                );
                changes.add(&field(&nic.name), text);
            }
            found.push(InterfaceUpdate::Planned {
                name: nic.name.clone(),
                link_up: nic.link_up,
            });
        }
        for interface in listed.iter().filter(|interface| interface.is_absent()) {
            found.push(InterfaceUpdate::Absent {
                name: interface.name.clone(),
                planned: own(&interface.name).is_some(),
            });
        }
        let named = |name: &str| {
            nics::effective_interfaces(vmi)
                .iter()
                .any(|(i, _)| i.name == name)
        };
        for nic in &self.nics {
            if !named(&nic.name) && !listed.iter().any(|interface| interface.name == nic.name) {
                let text = format!("the interface {:?} is a part of the VM while it runs", nic.name);
                changes.add(&list, text);
            }
        }
        found
    }
}

/// A volume to plug, if its disk is of a kind that can be.
fn new_volume(vmi: &Vmi, disk: &Disk, volume: &Volume, changes: &mut Changes<'_>) -> Option<NewVolume> {
    let disks = &vmi.spec.domain.devices.disks;
    let place = disks.iter().position(|given| given.name == disk.name);
    let path = vmi.at(&match place {
        Some(i) => format!("domain.devices.disks[{i}]"),
        None => "domain.devices.disks".to_owned(),
    });
    let (kind, target) = disk.target();
    if kind != "disk" {
        let text = format!("hotplugged volume {:?} must be a disk, not a {kind}", disk.name);
        changes.add(&format!("{path}.{kind}"), text);
        return None;
    }
    if disk.is_virtio_blk() {
        let text = format!("hotplugged disk {:?} must be on the bus scsi", disk.name);
        changes.add(&format!("{path}.disk.bus"), text);
        return None;
    }
    let claim = volume.persistent_volume_claim.as_ref();
    match cache(disk, &path) {
        Err(error) => {
            changes.errors.push(error);
            None
        }
        Ok(cache) => Some(NewVolume {
            name: disk.name.clone(),
            serial: disk.serial.clone().unwrap_or_default(),
            cache,
            read_only: claim.is_some_and(|claim| claim.read_only)
                || target.is_some_and(|target| target.readonly == Some(true)),
            shareable: disk.shareable,
            block_size: block_size(disk.block_size.as_ref()),
            error_policy: error_policy(disk.error_policy.as_deref()),
            origin: volume.origin(),
            source: DiskSource::Empty,
        }),
    }
}

/// Fields that differ and must not.
struct Changes<'a> {
    vmi: &'a Vmi,
    errors: Vec<FieldError>,
}

impl<'a> Changes<'a> {
    fn new(vmi: &'a Vmi) -> Self {
        Self {
            vmi,
            errors: Vec::new(),
        }
    }

    fn add(&mut self, field: &str, text: String) {
        self.errors.push(FieldError::invalid(field, text));
    }

    fn compare<T: PartialEq + std::fmt::Display>(&mut self, field: &str, what: &str, own: T, wanted: T) {
        if own != wanted {
            let text = format!("{what} cannot be changed while the VM runs, from '{own}' to '{wanted}'");
            self.add(field, text);
        }
    }

    fn end(self) -> Result<(), Vec<FieldError>> {
        match self.errors.is_empty() {
            true => Ok(()),
            false => Err(self.errors),
        }
    }
}

#[cfg(test)]
mod tests;
