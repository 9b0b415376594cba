//! Location of a VM's network. It is saved in the VM's state directory beside the records of the interfaces, so that
//! another process can tear down the network after the monitor was killed.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::NetworkError;
use super::netns::Netns;
use super::record;

/// Location of a VM's network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NetworkLocation {
    /// An existing namespace, which stays.
    Netns {
        path: PathBuf,
        /// Identity of the namespace, see [`Netns::id`].
        id: u64,
    },
    /// A namespace of its own, connected to the host's bridge.
    #[serde(rename_all = "camelCase")]
    Standalone {
        /// Name of the bridge's port.
        port: String,
        /// Interface index of the port, which no other port reuses.
        index: u32,
    },
}

pub(super) const FILE: &str = "netns.json";

impl NetworkLocation {
    /// Saves it in `dir`. Call this before anything is prepared there.
    pub fn save(&self, dir: &Path) -> Result<(), NetworkError> {
        record::save(&dir.join(FILE), self).map_err(NetworkError::from)
    }
}

/// True if a file of this name belongs to a VM's network.
pub fn is_state_file(name: &str) -> bool {
    let name = name.strip_suffix(".part").unwrap_or(name);
    name == FILE || record::is_record(name)
}

/// True if the VM with state directory `dir` uses the namespace at `netns`. Blocks.
pub fn uses_netns(dir: &Path, netns: &Path) -> bool {
    let Ok(Some(NetworkLocation::Netns { id, .. })) = record::load(&dir.join(FILE)) else {
        return false;
    };
    Netns::open(netns)
        .and_then(|netns| netns.id())
        .is_ok_and(|found| found == id)
}
