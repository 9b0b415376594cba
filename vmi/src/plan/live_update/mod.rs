//! Changes of a VMI that can be applied to a running VM, and those that require a restart.

use std::collections::{BTreeSet, HashSet};

use super::build::plan;
use super::credentials::{by_agent, credential_volume};
use super::disk::{DeviceType, DiskPlan, DiskSource, SeedData};
use super::disks::{block_size, cache, effective_disks, error_policy};
use super::hotplug::NewVolume;
use super::nic::{NicNetwork, NicPlan};
use super::nics;
use super::types::{BootPlan, FileRef, KernelFile, KernelOverride, PodResources, VmPlan};
use super::volume_source::{ExternalData, KERNEL_VOLUME, NETWORK_DATA, USER_DATA};
use crate::field::FieldError;
use crate::load::Vmi;
use crate::types::{Disk, Volume};
use crate::validate::validate;

/// Desired state of a running VM, as far as it can be changed without a restart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveUpdate {
    /// Hot-pluggable volumes that were not present at the start, in the manifest's order; one with the name of a CD-ROM
    /// drive is its disc. Their source is [`DiskSource::Empty`], since the manifest does not have the path of the data.
    pub volumes: Vec<NewVolume>,
    /// All interfaces that the manifest lists or implies.
    pub interfaces: Vec<InterfaceUpdate>,
    /// An error for each other field that has changed.
    pub restart_required: Vec<FieldError>,
}

/// Desired state of one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InterfaceUpdate {
    /// Present at the start.
    Planned {
        /// Name of the interface.
        name: String,
        /// Link state.
        link_up: bool,
    },
    /// To be added.
    Added(Box<NicPlan>),
    /// `state: absent`: the guest has no device for it.
    Absent {
        /// Name of the interface.
        name: String,
        /// It was present at the start.
        planned: bool,
    },
}

impl VmPlan {
    /// The plan without disks that were plugged, and without discs that were inserted, while the VM ran.
    #[must_use]
    pub fn without_plugged(&self, names: &[String]) -> VmPlan {
        let mut plan = self.clone();
        for name in names {
            match plan.disks.iter_mut().find(|disk| disk.name == *name) {
                Some(drive) if matches!(drive.device, DeviceType::Cdrom { .. }) => drive.eject(),
                _ => plan.disks.retain(|disk| disk.name != *name),
            }
        }
        plan
    }

    /// Compares a VMI with the plan that the VM was started from, which has no hot-plugged devices: see
    /// [`without_plugged`](Self::without_plugged).
    ///
    /// # Errors
    /// The errors of [`plan`](crate::plan()); the manifest is for another VM; it has a volume that is not hotpluggable,
    /// or other access credentials.
    pub fn live(&self, vmi: &Vmi) -> Result<LiveUpdate, Vec<FieldError>> {
        validate(vmi)?;
        let mut changes = Changes::new(vmi);
        changes.identity("metadata.name", "VM", &self.name, &vmi.name);
        changes.identity(
            "metadata.namespace",
            "a VM in the namespace",
            &self.namespace,
            &vmi.namespace,
        );
        if let (Some(own), Some(other)) = (&self.uid, &vmi.uid) {
            changes.identity("metadata.uid", "the VM with the UID", own, other);
        }
        // For another VM no further errors are useful.
        changes.end()?;

        let fixed = |volume: &Volume| self.disk(&volume.name).is_some_and(|disk| !disk.is_empty_drive());
        let drive = |name: &str| self.disk(name).is_some_and(DiskPlan::is_empty_drive);
        let hot = |volume: &Volume| volume.is_hotpluggable() && !fixed(volume);
        let mut kept = vmi.clone();
        kept.spec.volumes.retain(|volume| !hot(volume));
        // A drive is part of the VM, its disc is not.
        let disks = &mut kept.spec.domain.devices.disks;
        disks.retain(|disk| {
            !vmi.spec.volume(&disk.name).is_some_and(hot) || disk.cdrom.is_some() && drive(&disk.name)
        });
        let mut changes = Changes::new(vmi);
        // Reported first: planning would fail with missing data for such a volume.
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
                        "the volume {:?} was added but is not hotpluggable: restart the VM",
                        volume.name
                    ),
                );
            }
        }
        let list = vmi.at("accessCredentials");
        let secrets = |vmi: &Vmi| -> BTreeSet<String> {
            let credentials = vmi.spec.access_credentials.iter();
            credentials
                .map(|credential| credential.secret().to_owned())
                .collect()
        };
        let same = secrets(vmi).iter().eq(self.credentials.secrets.keys());
        if !same || !by_agent(vmi).eq(self.credentials.by_agent.iter().cloned()) {
            let text = "the access credentials cannot be changed while the VM runs: restart the VM";
            changes.add(&list, text.to_owned());
        }
        changes.end()?;
        let wanted = plan(&kept, &self.resources(&kept))?;
        let mut restart = Changes::new(vmi);
        self.compare(&wanted, &mut restart);
        let (listed, mut volumes) = (effective_disks(vmi), Vec::new());
        for volume in vmi.spec.volumes.iter().filter(|volume| hot(volume)) {
            if let Some(disk) = listed.iter().find(|disk| disk.name == volume.name) {
                volumes.extend(new_volume(vmi, disk, volume, drive(&disk.name), &mut restart));
            }
        }
        let interfaces = self.interfaces(vmi, &wanted, &mut restart);
        Ok(LiveUpdate {
            volumes,
            interfaces,
            restart_required: restart.errors,
        })
    }

    fn disk(&self, name: &str) -> Option<&DiskPlan> {
        self.disks.iter().find(|disk| disk.name == name)
    }

    /// The resources that the VM was started with, as far as the VMI uses them.
    fn resources(&self, vmi: &Vmi) -> PodResources {
        let mut resources = PodResources {
            uuid: self.uuid,
            ..PodResources::default()
        };
        for (secret, dir) in &self.credentials.secrets {
            resources.volumes.insert(credential_volume(secret), dir.clone());
        }
        for disk in &self.disks {
            let Some(volume) = vmi.spec.volume(&disk.name) else {
                continue;
            };
            let secret = |data: &SeedData| match data {
                SeedData::Secret(dir) => Some(dir.clone()),
                SeedData::Inline(_) | SeedData::SecretFiles(_) => None,
            };
            if let DiskSource::CloudInit {
                user_data,
                network_data,
                ..
            } = &disk.source
            {
                let data = [
                    (USER_DATA, Some(user_data)),
                    (NETWORK_DATA, network_data.as_ref()),
                ];
                for (key, data) in data {
                    if let Some(SeedData::SecretFiles(files)) = data {
                        let files = files.iter().map(|path| (key.to_owned(), path.clone()));
                        let given = resources.seed_files.entry(disk.name.clone()).or_default();
                        given.extend(files);
                    }
                }
            }
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
                DiskSource::Empty
                | DiskSource::EmptyDisk { .. }
                | DiskSource::DownwardMetrics
                | DiskSource::Descriptor(_) => None,
            };
            // A volume of another kind also gets what it needs: it is planned, and differs.
            let path = match ExternalData::of(volume) {
                ExternalData::Needed => Some(path.unwrap_or_default()),
                ExternalData::Optional => path,
                ExternalData::Refused => None,
            };
            resources
                .volumes
                .extend(path.map(|path| (disk.name.clone(), path)));
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
            "domain.devices.watchdog",
            "domain.devices.downwardMetrics",
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
            watchdog,
            metrics,
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
        let pages = |plan: &VmPlan| match plan.memory.hugepage_bytes {
            Some(bytes) => format!("{bytes} bytes"),
            None => "none".to_owned(),
        };
        changes.compare(cpu, "the topology", vcpus(self), vcpus(wanted));
        changes.compare(&memory, "the memory", mib(self), mib(wanted));
        changes.compare(hugepages, "the huge page size", pages(self), pages(wanted));
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
        changes.compare(rng, "the random number generator", on(self.rng), on(wanted.rng));
        let action = |plan: &VmPlan| match plan.watchdog {
            Some(action) => format!("{action:?}").to_lowercase(),
            None => "off".to_owned(),
        };
        changes.compare(watchdog, "the watchdog", action(self), action(wanted));
        let port = [self, wanted].map(|plan| on(plan.downward_metrics));
        changes.compare(metrics, "the port of downward metrics", port[0], port[1]);
        changes.compare(
            balloon,
            "the memory balloon",
            on(self.balloon),
            on(wanted.balloon),
        );
        changes.compare(
            console,
            "the serial console",
            on(self.serial_console),
            on(wanted.serial_console),
        );
        changes.compare(
            hotplug,
            "the SCSI controller",
            on(self.scsi.is_some()),
            on(wanted.scsi.is_some()),
        );
        changes.compare(acpi, "ACPI", on(self.acpi), on(wanted.acpi));
        changes.compare(
            grace,
            "the grace period",
            self.grace_period_seconds,
            wanted.grace_period_seconds,
        );
        let disks = [&self.boot, &wanted.boot].map(|boot| matches!(boot, BootPlan::Disks { .. }));
        // Differences in the boot order are found with the disks.
        if disks != [true, true] && self.boot != wanted.boot {
            changes.add(
                kernel,
                "the kernel, initrd and command line cannot be changed while the VM runs: restart the VM"
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
            let text = format!(
                "the disk {:?} cannot be removed while the VM runs: restart the VM",
                disk.name
            );
            changes.add(&list, text);
        }
        let vmi = changes.vmi;
        let field = |name: &str| {
            let disks = &vmi.spec.domain.devices.disks;
            let place = disks.iter().position(|given| given.name == name);
            let volume = vmi.spec.volumes.iter().position(|v| v.name == name);
            match (place, volume) {
                (Some(i), _) => format!("{list}[{i}]"),
                (None, Some(i)) => vmi.at(&format!("volumes[{i}]")),
                (None, None) => list.clone(),
            }
        };
        // Volumes that were added have been reported. This is a drive without one.
        for disk in wanted.disks.iter().filter(|disk| !own.contains(&disk.name)) {
            let text = format!(
                "the CD-ROM drive {:?} cannot be added while the VM runs: restart the VM",
                disk.name
            );
            changes.add(&field(&disk.name), text);
        }
        if own != others {
            // The addresses of the other disks depend on the missing ones.
            return;
        }
        // The vCPUs decide the queues and I/O threads, and their change is reported. A change of the settings for them
        // at the same time is not.
        let resized = self.topology != wanted.topology;
        for disk in &wanted.disks {
            let same = |there: &DiskPlan| {
                let mut wanted = DiskPlan {
                    // A running disk keeps what its claim's status said when the VM started.
                    preallocated: there.preallocated,
                    ..disk.clone()
                };
                if resized {
                    (wanted.queues, wanted.io_thread) = (there.queues, there.io_thread);
                }
                *there == wanted
            };
            if !self.disk(&disk.name).is_some_and(same) {
                let field = field(&disk.name);
                let text = format!(
                    "the disk {:?} and its volume cannot be changed while the VM runs: restart the VM",
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
        let resized = self.topology != wanted.topology;
        let mut found = Vec::new();
        for nic in &wanted.nics {
            let Some(there) = own(&nic.name) else {
                // A VM that was started without interfaces may have no network. To add one fails then.
                if nic.network == NicNetwork::Pod && !self.nics.is_empty() {
                    let text = format!(
                        "the interface {:?} on the pod network cannot be added while the VM runs: restart the VM",
                        nic.name
                    );
                    changes.add(&field(&nic.name), text);
                }
                found.push(InterfaceUpdate::Added(Box::new(nic.clone())));
                continue;
            };
            let same = NicPlan {
                queues: if resized { there.queues } else { nic.queues },
                link_up: there.link_up,
                // Without a MAC address in the manifest, that of the device is used.
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
                    "only the state of interface {:?} can be changed while the VM runs: restart the VM",
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
                let text = format!(
                    "the interface {:?} cannot be removed while the VM runs: set its state to absent or restart the VM",
                    nic.name
                );
                changes.add(&list, text);
            }
        }
        found
    }
}

/// Plans a hot-plugged volume, which is on the SCSI controller whatever its bus; reports disk types that cannot be
/// hot-plugged. `drive`: the VM has an empty CD-ROM drive
/// of its name.
fn new_volume(
    vmi: &Vmi,
    disk: &Disk,
    volume: &Volume,
    drive: bool,
    changes: &mut Changes<'_>,
) -> Option<NewVolume> {
    let disks = &vmi.spec.domain.devices.disks;
    let place = disks.iter().position(|given| given.name == disk.name);
    let path = vmi.at(&match place {
        Some(i) => format!("domain.devices.disks[{i}]"),
        None => "domain.devices.disks".to_owned(),
    });
    let (kind, target) = disk.target();
    let disc = drive && kind == "cdrom";
    if kind != "disk" && !disc {
        let text = format!("hotplugged volume {:?} must be a disk, not a {kind}", disk.name);
        changes.add(&format!("{path}.{kind}"), text);
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
            read_only: disc
                || claim.is_some_and(|claim| claim.read_only)
                || target.is_some_and(|target| target.readonly == Some(true)),
            shareable: disk.shareable,
            block_size: block_size(disk.block_size.as_ref()),
            error_policy: error_policy(disk.error_policy.as_deref()),
            preallocated: vmi.preallocated.contains(&disk.name),
            origin: volume.origin(),
            source: DiskSource::Empty,
        }),
    }
}

/// Collects errors for changed fields.
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

    /// Compares what identifies the VM.
    fn identity(&mut self, field: &str, kind: &str, own: &str, other: &str) {
        if own != other {
            self.add(
                field,
                format!("this manifest is for {kind} '{other}', not '{own}'"),
            );
        }
    }

    fn compare<T: PartialEq + std::fmt::Display>(&mut self, field: &str, what: &str, own: T, wanted: T) {
        if own != wanted {
            let text = format!("{what} cannot be changed from '{own}' to '{wanted}' while the VM runs");
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
