//! Teardown of a VM's network after its monitor was killed.

use std::path::Path;

use super::error::NetworkError;
use super::location::{FILE, NetworkLocation};
use super::netns::Netns;
use super::prepare::tear_down;
use super::record::{self, InterfaceRecord};
use super::standalone::StandaloneNetwork;

/// Tears down the network that the state directory `dir` records, if any. `netns` is its namespace if it is open;
/// otherwise the recorded path is opened, and a missing namespace needs no teardown. Blocks.
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
        // Everything inside goes with the namespace.
        NetworkLocation::Standalone { .. } => StandaloneNetwork::default().detach(&location)?,
    }
    InterfaceRecord::remove(&path).map_err(NetworkError::from)
}
