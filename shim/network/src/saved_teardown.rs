//! Tears down the network of a VM whose monitor did not.

use std::path::Path;

use super::error::NetworkError;
use super::location::{FILE, NetworkLocation};
use super::netns::Netns;
use super::prepare::tear_down;
use super::record::{self, InterfaceRecord};
use super::standalone::StandaloneNetwork;

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
