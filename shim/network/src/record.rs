//! Record of a preparation, saved in a file: enough to resume it, and to tear it down.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::NetworkFault;
use super::interface::Binding;
use super::mac::MacAddr;
use super::nic::{PodNic, SavedLink};

/// Phase of a preparation. Before *started* there is no record, which is KubeVirt's *Pending*.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    /// Devices may have been changed.
    Started,
    /// All devices are ready.
    Finished,
}

/// Record of one interface's preparation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InterfaceRecord {
    pub(super) phase: Phase,
    /// Identity of the network namespace ([`super::Netns::id`]).
    pub(super) netns: u64,
    /// Name of the interface.
    pub(super) interface: String,
    pub(super) binding: Binding,
    /// The guest's MAC address.
    pub(super) mac: MacAddr,
    /// Queue pairs of the tap.
    pub(super) queues: u16,
    /// The pod's NIC as the CNI plugin left it.
    pub(super) nic: PodNic,
    /// State to restore on the NIC of a bridge binding.
    #[serde(default, rename = "kept")]
    pub(super) saved_link: SavedLink,
    /// Sysctls and their old values.
    #[serde(rename = "switches")]
    pub(super) saved_sysctls: Vec<(String, String)>,
    /// Families of nftables tables that existed before.
    pub(super) foreign_tables: Vec<String>,
}

const PREFIX: &str = "network-";

impl InterfaceRecord {
    /// Path of a NIC's record.
    pub(super) fn path(dir: &Path, nic: &str) -> PathBuf {
        dir.join(format!("{PREFIX}{nic}.json"))
    }

    /// Reads a record, if it exists.
    pub(super) fn load(path: &Path) -> Result<Option<InterfaceRecord>, NetworkFault> {
        load(path)
    }

    /// Replaces the record atomically.
    pub(super) fn save(&self, path: &Path) -> Result<(), NetworkFault> {
        save(path, self)
    }

    /// Removes a record, if it exists.
    pub(super) fn remove(path: &Path) -> Result<(), NetworkFault> {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(NetworkFault::io(path)(e)),
            _ => Ok(()),
        }
    }

    /// Paths of all records in a directory.
    pub(super) fn all(dir: &Path) -> Result<Vec<PathBuf>, NetworkFault> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(NetworkFault::io(dir))? {
            let entry = entry.map_err(NetworkFault::io(dir))?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if is_record(&name) {
                found.push(entry.path());
            }
        }
        found.sort();
        Ok(found)
    }
}

/// True if a file of this name is a record.
pub(super) fn is_record(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(".json")
}

/// Reads a JSON file, if it exists.
pub(super) fn load<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, NetworkFault> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(NetworkFault::io(path)(e)),
    };
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(NetworkFault::io(path))
}

/// Writes a JSON file atomically.
pub(super) fn save(path: &Path, value: &impl Serialize) -> Result<(), NetworkFault> {
    let part = path.with_extension("json.part");
    let write = || {
        let mut file = File::create(&part)?;
        file.write_all(&serde_json::to_vec(value)?)?;
        file.sync_data()?;
        std::fs::rename(&part, path)
    };
    write().map_err(NetworkFault::io(path))
}
