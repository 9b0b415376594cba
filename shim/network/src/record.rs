//! What is known of a preparation, in a file: enough to go on with it, and to take back what it did.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::NetworkFault;
use super::interface::Binding;
use super::mac::MacAddr;
use super::nic::{PodNic, SavedLink};

/// How far a preparation is. Before it there is no record: KubeVirt's *Pending*.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    /// Something may have been changed.
    Started,
    /// All was.
    Finished,
}

/// The record of one interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InterfaceRecord {
    /// How far it is.
    pub(super) phase: Phase,
    /// The namespace it is of ([`super::Netns::id`]).
    pub(super) netns: u64,
    /// The name of the interface.
    pub(super) interface: String,
    /// How it is bound.
    pub(super) binding: Binding,
    /// What the guest's address is.
    pub(super) mac: MacAddr,
    /// Pairs of queues that its tap is made for.
    pub(super) queues: u16,
    /// The pod's device as it was.
    pub(super) nic: PodNic,
    /// What comes back to it, where the guest takes it over.
    #[serde(default, rename = "kept")]
    pub(super) saved_link: SavedLink,
    /// Switches of the namespace as they were.
    #[serde(rename = "switches")]
    pub(super) saved_sysctls: Vec<(String, String)>,
    /// Tables of nftables that were there already, by family.
    pub(super) foreign_tables: Vec<String>,
}

const PREFIX: &str = "network-";

impl InterfaceRecord {
    /// Where the record of a device is.
    pub(super) fn path(dir: &Path, nic: &str) -> PathBuf {
        dir.join(format!("{PREFIX}{nic}.json"))
    }

    /// Reads it, if there is one.
    pub(super) fn load(path: &Path) -> Result<Option<InterfaceRecord>, NetworkFault> {
        load(path)
    }

    /// Replaces it as a whole: whoever reads it finds the old one or the new one.
    pub(super) fn save(&self, path: &Path) -> Result<(), NetworkFault> {
        save(path, self)
    }

    /// Forgets it; one that is gone is no fault.
    pub(super) fn remove(path: &Path) -> Result<(), NetworkFault> {
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(NetworkFault::io(path)(e)),
            _ => Ok(()),
        }
    }

    /// The records of a directory.
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

/// Whether a file of this name is a record.
pub(super) fn is_record(name: &str) -> bool {
    name.starts_with(PREFIX) && name.ends_with(".json")
}

/// Reads a file, if it is there.
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

/// Writes a file, in place of one that is there, as a whole.
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
