//! The description of a snapshot: snapshot.json.
//!
//! The format has a version. A later version of Husk reads this one, so no field may change its meaning. Everything read
//! from it is untrusted.

use std::path::Path;

use husk_network::MacAddr;
use husk_vmi::{DiskSource, NicBinding, VmPlan};
use husk_volumes::{BlockSizes, FileIdentity, ImageFormat};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::check;
use super::checksums::Checksums;
use super::error::SnapshotError;
use super::interfaces::PluggedInterface;

/// The version of the format.
pub(crate) const VERSION: u32 = 1;
/// The description.
pub(super) const SNAPSHOT: &str = "snapshot.json";
/// The machine's state, by the VMM.
pub(crate) const STATE: &str = "state.json";
/// The guest's memory.
pub(crate) const MEMORY: &str = "memory";
/// The checksums of the other files.
pub(crate) const CHECKSUMS: &str = "checksums";
/// Maximum size of the description, in bytes.
pub(super) const LIMIT: usize = 8 << 20;

/// The description of a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Snapshot {
    pub(crate) version: u32,
    /// The version of Husk that made it.
    pub husk: String,
    /// When it was made, in seconds since 1970.
    pub time: u64,
    /// The VM, with its hotplugged volumes and the MAC addresses that it has.
    pub plan: VmPlan,
    /// The metadata of its manifest.
    pub vmi: Value,
    /// Size of state.json in bytes.
    pub(crate) state_bytes: u64,
    /// Size of memory in bytes.
    pub(crate) memory_bytes: u64,
    /// In the order of the plan.
    pub(crate) disks: Vec<SavedDisk>,
    /// Interfaces that were plugged while the VM ran.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(crate) interfaces: Vec<PluggedInterface>,
    /// The VM has resumed. Only recorded if a writable disk is outside.
    pub(crate) resumed: bool,
    /// When it was restored, in seconds since 1970. Only recorded if a writable disk is outside.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) consumed: Option<u64>,
    /// Only made on request.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(crate) checksums: Option<Checksums>,
}

/// A disk of the VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct SavedDisk {
    pub(crate) name: String,
    /// It was plugged while the VM ran, or its disc inserted.
    pub(crate) plugged: bool,
    pub(crate) content: DiskContent,
}

/// The content of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) enum DiskContent {
    /// It has none, or the monitor creates it again.
    Remade,
    /// It is in the snapshot.
    #[serde(rename_all = "camelCase")]
    Held {
        image: SnapshotImage,
        /// The backing image, if `image` is an overlay.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        base: Option<BaseContent>,
        /// Block sizes that the guest sees; none if the VMM chooses.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        block_sizes: Option<BlockSizes>,
    },
    /// It is at the path of the plan.
    Outside(FileIdentity),
}

/// An image in the snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct SnapshotImage {
    /// Name of the file.
    pub(crate) file: String,
    pub(crate) format: ImageFormat,
}

/// The content of the backing image of an overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) enum BaseContent {
    /// It is in the snapshot.
    Held(SnapshotImage),
    /// It is at the path of the plan.
    Outside(FileIdentity),
}

/// The present time, in seconds since 1970.
pub(crate) fn now() -> u64 {
    u64::try_from(Timestamp::now().as_second()).unwrap_or(0)
}

impl Snapshot {
    /// Parses and checks a description. `directory` is for errors.
    ///
    /// # Errors
    /// It is damaged, of another version of the format, or of a VM that cannot exist.
    pub fn parse(text: &[u8], directory: &Path) -> Result<Snapshot, SnapshotError> {
        let invalid = |reason: String| SnapshotError::invalid(directory, reason);
        let document: Value = serde_json::from_slice(text).map_err(|error| invalid(error.to_string()))?;
        let version = document.get("version").and_then(Value::as_u64);
        match version {
            Some(version) if version == u64::from(VERSION) => {}
            Some(version) => {
                return Err(SnapshotError::Version {
                    directory: directory.to_owned(),
                    version,
                });
            }
            None => return Err(invalid("version: it is missing, or not a number".into())),
        }
        // Deserialised from the text, errors have a position.
        let snapshot: Snapshot = serde_json::from_slice(text).map_err(|error| invalid(error.to_string()))?;
        check::known_fields(&document, &snapshot).map_err(invalid)?;
        check::check(&snapshot).map_err(invalid)?;
        Ok(snapshot)
    }

    /// Names of the volumes that are written to and are not in the snapshot. If there is one, it can be restored once,
    /// and only if the VM has not gone on.
    #[must_use]
    pub fn unsaved_volumes(&self) -> Vec<&str> {
        let disks = self.plan.disks.iter().zip(&self.disks);
        let outside = disks.filter(|(plan, saved)| {
            matches!(saved.content, DiskContent::Outside(_)) && !plan.read_only && !plan.overlay
        });
        outside.map(|(plan, _)| plan.name.as_str()).collect()
    }

    /// Names of the volumes whose images are copied: a VM that goes on from the snapshot writes to the copy, which ends
    /// with it.
    #[must_use]
    pub fn written_copies(&self) -> Vec<&str> {
        let disks = self.plan.disks.iter().zip(&self.disks);
        let copies = disks.filter(|(plan, saved)| {
            let on_host = matches!(plan.source, DiskSource::File(_) | DiskSource::HostDisk { .. });
            on_host && !plan.read_only && matches!(saved.content, DiskContent::Held { base: None, .. })
        });
        copies.map(|(plan, _)| plan.name.as_str()).collect()
    }

    /// Names of the interfaces.
    pub fn interface_names(&self) -> impl Iterator<Item = &str> {
        let planned = self.plan.nics.iter().map(|nic| &*nic.name);
        planned.chain(self.interfaces.iter().map(|interface| &*interface.name))
    }

    /// The plan of a VM of this name that goes on from the snapshot. With `replug_nics` each interface has a new, random
    /// MAC address.
    ///
    /// # Errors
    /// A clone would take the address of the VM.
    pub fn plan_for(&self, namespace: &str, name: &str, replug_nics: bool) -> Result<VmPlan, SnapshotError> {
        let mut plan = self.plan.clone();
        if replug_nics {
            plan.nics
                .iter_mut()
                .for_each(|nic| nic.mac = Some(MacAddr::random().0));
        } else if (namespace, name) != (&*plan.namespace, &*plan.name) {
            let mut nics = plan.nics.iter();
            let bridged = nics.find(|nic| nic.binding == NicBinding::Bridge);
            let plugged = || self.interfaces.first().map(|interface| &interface.name);
            if let Some(name) = bridged.map(|nic| &nic.name).or_else(plugged) {
                let reason = format!(
                    "with the binding `bridge` the guest keeps its MAC and IP addresses, which are those of {}/{}: --replug-nics \
                     gives the clone others; or leave out --name",
                    plan.namespace, plan.name
                );
                return Err(SnapshotError::interface(name, reason));
            }
        }
        namespace.clone_into(&mut plan.namespace);
        name.clone_into(&mut plan.name);
        Ok(plan)
    }

    /// Names of the disks that were plugged while the VM ran, and of the drives whose disc was inserted then.
    #[must_use]
    pub fn plugged_disks(&self) -> Vec<String> {
        let plugged = self.disks.iter().filter(|disk| disk.plugged);
        plugged.map(|disk| disk.name.clone()).collect()
    }

    /// The metadata of the manifest, of a VM of this name.
    #[must_use]
    pub fn metadata_for(&self, namespace: &str, name: &str) -> Value {
        let mut vmi = self.vmi.clone();
        if let Some(fields) = vmi.as_object_mut() {
            fields.insert("namespace".into(), namespace.into());
            fields.insert("name".into(), name.into());
        }
        vmi
    }

    /// Refuses a snapshot without checksums.
    ///
    /// # Errors
    /// It has none.
    pub fn check_verifiable(&self, directory: &Path) -> Result<(), SnapshotError> {
        self.checksums(directory).map(drop)
    }

    pub(super) fn checksums(&self, directory: &Path) -> Result<&Checksums, SnapshotError> {
        let none = || SnapshotError::NoChecksums(directory.to_owned());
        self.checksums.as_ref().ok_or_else(none)
    }

    /// Refuses a snapshot that can be restored once, and was, or whose VM has resumed.
    ///
    /// # Errors
    /// It cannot be restored.
    pub fn check_restorable(&self, directory: &Path) -> Result<(), SnapshotError> {
        let directory = directory.to_owned();
        let outside = self.unsaved_volumes();
        let Some(volume) = outside.first().map(|volume| (*volume).to_owned()) else {
            return Ok(());
        };
        match self.consumed {
            Some(time) => Err(SnapshotError::Consumed {
                directory,
                time,
                volume,
            }),
            None if self.resumed => Err(SnapshotError::Resumed { directory, volume }),
            None => Ok(()),
        }
    }
}
