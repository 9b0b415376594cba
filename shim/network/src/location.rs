//! Where a VM's network is, kept in the VM's state directory beside the records of its interfaces, so that another
//! process can take back what a monitor did that was killed.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::NetworkError;
use super::netns::Netns;
use super::prepare::tear_down;
use super::record::{self, InterfaceRecord};
use super::standalone::StandaloneNetwork;

/// Where a VM's network is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NetworkLocation {
    /// In a namespace that was there before, and stays.
    Netns {
        /// What it is called.
        path: PathBuf,
        /// What it is ([`Netns::id`]).
        id: u64,
    },
    /// In one of its own, on this machine's bridge.
    #[serde(rename_all = "camelCase")]
    Standalone {
        /// The bridge's port.
        port: String,
        /// Its number, which no other port has again.
        index: u32,
    },
}

const FILE: &str = "netns.json";

impl NetworkLocation {
    /// Keeps it in `dir`; before anything is prepared there.
    pub fn save(&self, dir: &Path) -> Result<(), NetworkError> {
        record::save(&dir.join(FILE), self).map_err(NetworkError::from)
    }
}

/// Whether a file of this name is kept for a network.
pub fn is_state_file(name: &str) -> bool {
    let name = name.strip_suffix(".part").unwrap_or(name);
    name == FILE || record::is_record(name)
}

/// Whether the VM whose state directory this is has the namespace at `netns`. Blocks.
pub fn uses_netns(dir: &Path, netns: &Path) -> bool {
    let Ok(Some(NetworkLocation::Netns { id, .. })) = record::load(&dir.join(FILE)) else {
        return false;
    };
    Netns::open(netns)
        .and_then(|netns| netns.id())
        .is_ok_and(|found| found == id)
}

/// Takes back what was done to the network of the VM whose state directory this is, if anything is kept of it there.
/// `netns` is its namespace, if it is open; else it is looked for, and one that has gone needs nothing. Blocks.
pub fn tear_down_saved(dir: &Path, netns: Option<&Netns>) -> Result<(), NetworkError> {
    let path = dir.join(FILE);
    let Some(location) = record::load(&path)? else {
        return Ok(());
    };
    match &location {
        NetworkLocation::Netns { path, id } => {
            let found = netns.cloned().or_else(|| Netns::open(path).ok());
            let same = found.filter(|netns| netns.id().is_ok_and(|found| found == *id));
            if let Some(netns) = same {
                tear_down(&netns, dir)?;
            }
        }
        // What was done inside goes with the namespace.
        NetworkLocation::Standalone { .. } => StandaloneNetwork::default().detach(&location)?,
    }
    InterfaceRecord::remove(&path).map_err(NetworkError::from)
}
