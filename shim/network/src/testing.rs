//! The records that a teardown reads, without the kernel, for fuzz targets.

use std::path::Path;

use super::error::NetworkError;
use super::location::NetworkLocation;
use super::netlink::saved_routes;
use super::record::{self, InterfaceRecord};

/// Reads the record of an interface, and writes it again.
pub fn rewrite_record(path: &Path) -> Result<Option<Vec<u8>>, NetworkError> {
    let record = InterfaceRecord::load(path)?;
    Ok(record.and_then(|record| serde_json::to_vec(&record).ok()))
}

/// Reads the location of a network.
pub fn location(path: &Path) -> Result<Option<NetworkLocation>, NetworkError> {
    Ok(record::load(path)?)
}

/// The requests that restore a route that the kernel has reported.
pub fn replay_route(message: &[u8]) -> Vec<Vec<u8>> {
    saved_routes::replay(message)
}

/// The request that adds a saved address again.
pub fn replay_address(message: &[u8]) -> Vec<u8> {
    saved_routes::replay_address(message)
}

/// True if both messages are the same route.
pub fn is_same_route(one: &[u8], other: &[u8]) -> bool {
    saved_routes::is_same(one, other)
}
