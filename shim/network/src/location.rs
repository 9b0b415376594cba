//! Where a VM's network is, kept in the VM's state directory beside the records of its interfaces, so that another
//! process can take back what a monitor did that was killed.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::NetworkError;
use super::netns::Netns;
use super::record;

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

pub(super) const FILE: &str = "netns.json";

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
