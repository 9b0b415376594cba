//! Synchronisation of a VMI's volumes and of the sizes of its disks.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::join_all;
use husk_proto::shim::v1::change::Kind;
use husk_proto::shim::v1::{Disk, VolumeStatus};
use husk_proto::vmm::v1::Fd;
use husk_vmi::{DiskSource, NewVolume, Vmi};
use husk_volumes::PathPolicy;
use tokio::time::timeout;

use super::{SyncProgress, VmiSync};
use crate::monitor::vm_error::VmError;

/// Data of volumes that the caller gives, by the volume's name.
#[derive(Debug)]
pub(super) struct CallerVolumeData {
    pub(super) paths: HashMap<String, String>,
    pub(super) fds: HashMap<String, Fd>,
}

impl CallerVolumeData {
    /// Checks that each is for a volume of the VMI, and that no volume has two.
    pub(super) fn check(&self, vmi: &Vmi) -> Result<(), VmError> {
        let mut names = self.paths.keys().chain(self.fds.keys());
        if let Some(name) = names.find(|name| vmi.spec.volume(name).is_none()) {
            return Err(VmError::invalid_argument(format!(
                "the VMI has no volume {name:?}"
            )));
        }
        if let Some(name) = self.fds.keys().find(|name| self.paths.contains_key(*name)) {
            return Err(VmError::invalid_argument(format!(
                "volume {name:?} is given by its path and by a descriptor"
            )));
        }
        Ok(())
    }
}

/// Maximum time to wait for the check of disk sizes.
const SIZE_CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// Phase of a volume that the guest has not released.
const DETACHING: &str = "Detaching";

/// True if a volume of the object `origin` is of another one than the plugged disk. That of AddVolume is not known.
fn is_replaced(disk: &Disk, origin: Option<String>) -> bool {
    !disk.origin.is_empty() && origin.is_some_and(|origin| origin != disk.origin)
}

impl VmiSync {
    /// Extends images and resizes disks, then unplugs and plugs volumes. Returns the state of each volume.
    pub(super) async fn volumes(
        &self,
        vmi: &Vmi,
        wanted: Vec<NewVolume>,
        given: &CallerVolumeData,
        done: &mut SyncProgress,
    ) -> Result<Vec<VolumeStatus>, VmError> {
        match timeout(SIZE_CHECK_TIMEOUT, self.disks.check_sizes(vmi.claims.clone())).await {
            Ok(grown) => {
                let grown = grown?;
                for name in &grown.names {
                    done.note(Kind::DiskGrew, name);
                }
                done.waits |= grown.deferred;
            }
            // The check goes on in the background.
            Err(_) => done.waits = true,
        }
        let mut statuses: BTreeMap<String, VolumeStatus> = BTreeMap::new();
        for status in self.unplug(vmi, done).await? {
            statuses.insert(status.name.clone(), status);
        }
        for volume in wanted {
            let name = volume.name.clone();
            // The volume that it replaces is still there.
            if statuses
                .get(&name)
                .is_some_and(|status| status.phase == DETACHING)
            {
                continue;
            }
            let status = self.plug(volume, given, done).await?;
            done.waits |= status.phase != "Ready";
            statuses.insert(name, status);
        }
        // A disk of the start is always ready.
        for disk in self.shown().into_iter().filter(|disk| !disk.plugged) {
            if vmi.spec.volume(&disk.name).is_some() {
                statuses.entry(disk.name.clone()).or_insert_with(|| VolumeStatus {
                    name: disk.name.clone(),
                    disk: Some(disk),
                    ..VolumeStatus::default()
                });
            }
        }
        Ok(statuses.into_values().collect())
    }

    /// Unplugs hotplugged volumes that are not in the VMI, or are of another object there, in parallel. Returns those
    /// that the guest has not released.
    async fn unplug(&self, vmi: &Vmi, done: &mut SyncProgress) -> Result<Vec<VolumeStatus>, VmError> {
        let limit = self.release_timeout();
        let superfluous = self.shown().into_iter().filter(|disk| {
            let volume = vmi.spec.volume(&disk.name);
            disk.plugged && volume.is_none_or(|volume| is_replaced(disk, volume.origin()))
        });
        let removals = superfluous.map(async |disk| {
            let removed = self.disks.remove_within(limit, disk.name.clone()).await;
            (disk, removed)
        });
        let mut left = Vec::new();
        for (disk, removed) in join_all(removals).await {
            let (reason, message) = match removed {
                Some(Ok(_)) => {
                    done.note(Kind::VolumeRemoved, &disk.name);
                    continue;
                }
                // Another call has removed it.
                Some(Err(VmError::NotFound(_))) => continue,
                Some(Err(refused)) if self.is_no_failure(&refused) => ("VolumeInUse", refused.to_string()),
                Some(Err(refused)) => ("VolumeDetachFailed", refused.to_string()),
                None => ("VolumeInUse", "the guest has not released it".to_owned()),
            };
            done.waits = true;
            left.push(VolumeStatus {
                name: disk.name.clone(),
                disk: self.find_disk(&disk.name),
                phase: DETACHING.into(),
                reason: reason.into(),
                message,
            });
        }
        Ok(left)
    }

    /// True for an error whose cause is a snapshot, which ends soon, or the end of the VM.
    fn is_no_failure(&self, error: &VmError) -> bool {
        *error == VmError::being_saved() || self.vm.running().is_none()
    }

    /// Returns removed volumes whose last flush failed, also those that the guest released after the call that removed
    /// them. Each is reported once.
    pub(super) async fn lost_writes(&self) -> Result<Vec<VolumeStatus>, VmError> {
        let lost = self.disks.take_lost_writes().await?.into_iter();
        let statuses = lost.map(|(name, flush_error)| VolumeStatus {
            name,
            disk: None,
            phase: "UnMountedFromPod".into(),
            reason: "FlushFailed".into(),
            message: format!("the last writes may be lost: {flush_error}"),
        });
        Ok(statuses.collect())
    }

    /// Plugs a volume unless it is present or its data is not. Returns its state.
    async fn plug(
        &self,
        volume: NewVolume,
        given: &CallerVolumeData,
        done: &mut SyncProgress,
    ) -> Result<VolumeStatus, VmError> {
        let name = volume.name.clone();
        let status = |disk, phase: &str, reason: &str, message: String| VolumeStatus {
            name: name.clone(),
            disk,
            phase: phase.into(),
            reason: reason.into(),
            message,
        };
        let ready = |disk| {
            let message = format!("Successfully attach hotplugged volume {name} to VM");
            status(disk, "Ready", "VolumeReady", message)
        };
        if let Some(disk) = self.find_disk(&name).filter(|disk| !disk.is_empty_drive()) {
            return Ok(match disk.removing {
                false => ready(Some(disk)),
                true => {
                    let message = "the guest has not released the previous volume of this name".to_owned();
                    status(Some(disk), DETACHING, "VolumeInUse", message)
                }
            });
        }
        let failed = |error: VmError| {
            let reason = match self.is_no_failure(&error) {
                true => "VolumeInUse",
                false => "VolumeAttachFailed",
            };
            status(None, "MountedToPod", reason, error.to_string())
        };
        if let Some(fd) = given.fds.get(&name) {
            let (fd, id) = match self.files.take(&name, fd, volume.read_only).await {
                Ok(taken) => taken,
                Err(error) => return Ok(failed(error)),
            };
            let volume = NewVolume {
                source: DiskSource::Descriptor(id),
                ..volume
            };
            return Ok(match self.disks.add(volume, Some(fd)).await {
                Ok(_) => {
                    done.note(Kind::VolumeAdded, &name);
                    ready(self.find_disk(&name))
                }
                Err(error) => failed(error),
            });
        }
        let given = given.paths.get(&name);
        let path = match self.path(&name, given).await {
            Ok(path) => path,
            Err(error) => return Ok(failed(error)),
        };
        let Some(path) = path else {
            let message = match self.environment.paths {
                PathPolicy::PodMounts(_) => "its data is not in the pod's hotplug directory yet",
                PathPolicy::Caller => "no path given: use --volume NAME=PATH",
            };
            return Ok(status(None, "Pending", "VolumeNotMountedToPod", message.into()));
        };
        let volume = NewVolume {
            source: DiskSource::File(path),
            ..volume
        };
        match self.disks.add(volume, None).await {
            Ok(_) => {
                done.note(Kind::VolumeAdded, &name);
                Ok(ready(self.find_disk(&name)))
            }
            // The caller's request is wrong, not the state of the VM.
            Err(refused)
                if given.is_some()
                    && matches!(refused, VmError::NotPermitted(_) | VmError::InvalidArgument(_)) =>
            {
                Err(refused)
            }
            Err(refused) => Ok(failed(refused)),
        }
    }

    /// Path of a volume's data, if it is present.
    async fn path(&self, name: &str, given: Option<&String>) -> Result<Option<PathBuf>, VmError> {
        if let Some(path) = given {
            return Ok(Some(path.into()));
        }
        let (environment, volume) = (self.environment.clone(), name.to_owned());
        let find = move || environment.paths.find_hotplugged(&volume);
        self.files.call(name, find).await
    }

    fn shown(&self) -> Vec<Disk> {
        self.disks.watch().borrow().clone()
    }

    fn find_disk(&self, name: &str) -> Option<Disk> {
        self.shown().into_iter().find(|disk| disk.name == name)
    }
}
