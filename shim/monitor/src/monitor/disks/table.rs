//! The present disks of a VM, and the file that describes them.

use std::collections::HashSet;
use std::path::PathBuf;

use husk_proto::shim::v1::Disk;
use husk_proto::vmm::v1 as vmm;
use husk_vmi::{DeviceType, DiskPlan, NewVolume, PlugError, PlugPlan, VmPlan};
use tokio::sync::watch;
use tracing::warn;

use crate::monitor::stdio;
use crate::monitor::vm_error::VmError;

/// The plan of a VM with all changes since its start, and the file that holds it.
#[derive(Debug)]
pub(in crate::monitor) struct DiskTable {
    plan: VmPlan,
    /// Disks that were plugged, and drives whose disc was inserted.
    plugged: HashSet<String>,
    path: PathBuf,
    shown: watch::Sender<Vec<Disk>>,
}

impl DiskTable {
    pub(super) fn new(plan: VmPlan, path: PathBuf) -> DiskTable {
        let shown = plan.disks.iter().map(|disk| show(disk, false)).collect();
        DiskTable {
            plan,
            plugged: HashSet::new(),
            path,
            shown: watch::Sender::new(shown),
        }
    }

    /// Watches the disks.
    pub(super) fn subscribe(&self) -> watch::Receiver<Vec<Disk>> {
        self.shown.subscribe()
    }

    /// The plan with all changes.
    pub(super) fn plan(&self) -> &VmPlan {
        &self.plan
    }

    /// Disks that were plugged, and drives whose disc was inserted.
    pub(super) fn plugged(&self) -> &HashSet<String> {
        &self.plugged
    }

    /// Marks disks as plugged.
    pub(super) fn set_plugged(&mut self, names: Vec<String>) {
        for name in names {
            self.change(&name, |disk| disk.plugged = true);
            self.plugged.insert(name);
        }
    }

    /// Sets the size of a disk, as the guest sees it.
    pub(super) fn set_bytes(&self, name: &str, bytes: u64) {
        self.change(name, |disk| disk.bytes = Some(bytes));
    }

    /// Marks a disk as being removed, or as staying.
    pub(super) fn set_removing(&self, name: &str, removing: bool) {
        self.change(name, |disk| disk.removing = removing);
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Disk)) {
        self.shown.send_if_modified(|disks| {
            let disk = disks.iter_mut().find(|disk| disk.name == name);
            disk.map(change).is_some()
        });
    }

    /// True if the guest may write to a disk.
    pub(super) fn is_writable(&self, name: &str) -> bool {
        let disk = self.plan.disks.iter().find(|disk| disk.name == name);
        disk.is_some_and(|disk| !disk.read_only)
    }

    /// Plans the disk of a volume that is to be added.
    pub(super) fn plug(&self, volume: &NewVolume) -> Result<PlugPlan, VmError> {
        self.plan.plug(volume).map_err(|error| {
            let text = error.to_string();
            match error {
                PlugError::Name(..) | PlugError::Serial(_) | PlugError::Path(_) | PlugError::Source(_) => {
                    VmError::InvalidArgument(text)
                }
                PlugError::NameTaken(_) | PlugError::SourceTaken(_) => VmError::AlreadyExists(text),
                PlugError::Disabled => VmError::WrongState(text),
            }
        })
    }

    /// Checks that a volume is hotplugged. The error texts are KubeVirt's.
    pub(super) fn check_plugged(&self, name: &str) -> Result<(), VmError> {
        if self.plugged.contains(name) {
            return Ok(());
        }
        if self.plan.disks.iter().any(|disk| disk.name == name) {
            let text = format!("Unable to remove volume [{name}] because it is not hotpluggable");
            return Err(VmError::wrong_state(text));
        }
        let text = format!("Unable to remove volume [{name}] because it does not exist");
        Err(VmError::not_found(text))
    }

    pub(super) fn add(&mut self, disk: DiskPlan) {
        self.plugged.insert(disk.name.clone());
        self.shown.send_modify(|disks| disks.push(show(&disk, true)));
        self.plan.disks.push(disk);
        self.save();
    }

    /// The CD-ROM drive of this name. It stays when its disc is removed.
    pub(super) fn drive(&self, name: &str) -> Option<&DiskPlan> {
        let disk = self.plan.disks.iter().find(|disk| disk.name == name)?;
        matches!(disk.device, DeviceType::Cdrom { .. }).then_some(disk)
    }

    /// Records that a disc of this size in bytes is in a drive.
    pub(super) fn insert(&mut self, drive: DiskPlan, bytes: u64) {
        self.plugged.insert(drive.name.clone());
        self.change(&drive.name, |shown| {
            *shown = Disk {
                bytes: Some(bytes),
                ..show(&drive, true)
            };
        });
        self.replace(drive);
    }

    /// Removes a disk, or the disc of a drive.
    pub(super) fn remove(&mut self, name: &str) {
        self.plugged.remove(name);
        if let Some(mut drive) = self.drive(name).cloned() {
            drive.eject();
            self.change(name, |shown| *shown = show(&drive, false));
            return self.replace(drive);
        }
        self.shown
            .send_modify(|disks| disks.retain(|disk| disk.name != name));
        self.plan.disks.retain(|disk| disk.name != name);
        self.save();
    }

    fn replace(&mut self, disk: DiskPlan) {
        if let Some(present) = self.plan.disks.iter_mut().find(|other| other.name == disk.name) {
            *present = disk;
        }
        self.save();
    }

    fn save(&self) {
        if let Err(error) = stdio::replace_json(&self.path, &self.plan) {
            // The file is out of date then. The VM is not affected.
            warn!(path = %self.path.display(), %error, "the plan could not be written");
        }
    }
}

fn show(disk: &DiskPlan, plugged: bool) -> Disk {
    let scsi = disk.scsi_address().map(|address| vmm::ScsiAddress {
        controller: 0,
        target: address.target.into(),
        lun: address.lun.into(),
    });
    Disk {
        name: disk.name.clone(),
        target: disk.target.clone(),
        scsi,
        plugged,
        read_only: disk.read_only,
        bytes: disk.is_empty_drive().then_some(0),
        removing: false,
        origin: disk.origin.clone().unwrap_or_default(),
    }
}
