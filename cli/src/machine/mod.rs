//! The objects of this machine and the VMs among them, which systemd keeps running.
//!
//! ```text
//! husk apply ──▶ objects, claims ──▶ systemd: husk@NAMESPACE:NAME.service, one per VM
//!                                      │ husk service: reads the objects, provides the data, is the VM's monitor
//!                                      └ husk-vmm
//! ```
//!
//! What a VM does is asked of systemd and of its monitor. The only state that is kept beside the objects and claims is
//! that a new VM was not started yet.

mod data;
mod data_volume;
mod deletion;
#[cfg(test)]
pub(crate) mod fake_systemd;
mod first_start;
mod object_files;
pub(crate) mod service;
pub(crate) mod status;
pub(crate) mod systemd;
mod templates;
#[cfg(test)]
pub(crate) mod test_manifests;
pub(crate) mod unit;
pub(crate) mod vm;

pub(crate) use data::{Data, DataError, claim_of};
pub(crate) use data_volume::{DataVolumePhase, import, phase, refuse_deleted};
pub(crate) use deletion::{delete, delete_command, finish_deletions};
pub(crate) use first_start::FirstStart;
pub(crate) use templates::store_templates;

use std::path::Path;

use husk_claims::ClaimStore;
use husk_images::data_directory;
use husk_objects::{ObjectError, ObjectStore, Objects, StoredObject};
use husk_vmi::objects::{Object, ObjectKind};

use crate::failure::{Failure, print_warning};
use crate::vm_ref::VmRef;

/// The objects and volumes of this user on this machine.
#[derive(Debug, Clone)]
pub(crate) struct LocalStores {
    pub objects: ObjectStore,
    pub claims: ClaimStore,
}

impl LocalStores {
    /// The stores in the data directory of the user.
    pub(crate) fn locate() -> Result<LocalStores, Failure> {
        Ok(LocalStores::at(&data_directory()?))
    }

    /// The stores in the directory `data`, which need not exist.
    pub(crate) fn at(data: &Path) -> LocalStores {
        LocalStores {
            objects: ObjectStore::at(data.join("objects")),
            claims: ClaimStore::at(data.join("volumes")),
        }
    }

    /// All objects; a damaged one is left out, with a warning.
    pub(crate) fn read(&self) -> Result<Objects, Failure> {
        let objects = self.objects.read()?;
        for damaged in &objects.damaged {
            print_warning(&format!("{damaged}: correct the file, or apply the object again"));
        }
        Ok(objects)
    }

    /// The VM of this name, a VirtualMachine or a VirtualMachineInstance.
    ///
    /// # Errors
    /// [`ObjectError::NotFound`] if there is none; a damaged file counts as the VM.
    pub(crate) fn vm(&self, name: &VmRef) -> Result<StoredObject, ObjectError> {
        let [machine, instance] = vm::keys(name);
        match self.objects.get(&machine) {
            Err(not_found @ ObjectError::NotFound(_)) => match self.objects.get(&instance) {
                Err(ObjectError::NotFound(_)) => Err(not_found),
                found => found,
            },
            found => found,
        }
    }

    /// True if an object was deleted since it was read, or is being deleted; another of its name may be there.
    pub(crate) fn is_gone(&self, object: &StoredObject) -> bool {
        match self.objects.get(&object.key) {
            Ok(now) => now.is_deleting() || now.uid() != object.uid(),
            // A damaged file is no deletion.
            Err(error) => matches!(error, ObjectError::NotFound(_)),
        }
    }

    /// The objects for the expansion of a VM: those of the store, of which `newer` have other versions, and the claims.
    pub(crate) fn known(&self, stored: &Objects, newer: &[Object]) -> Result<Vec<Object>, Failure> {
        let claims = self.claims.list()?.into_iter().flatten().map(|claim| Object {
            document: None,
            warnings: Vec::new(),
            value: serde_json::Value::Null,
            kind: ObjectKind::PersistentVolumeClaim(claim.object),
        });
        let stored = stored.objects.iter().filter(|stored| !stored.is_deleting());
        let stored = stored.map(|stored| stored.object.clone());
        Ok(claims.chain(stored).chain(newer.iter().cloned()).collect())
    }
}
