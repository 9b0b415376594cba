//! The bridge that connects this machine and the cluster's nodes.
//!
//! ```text
//! control plane ── husk-cluster 172.30.0.1 ─┬─ husk-node1 ── lab 1: 172.30.0.11, pods 10.244.1.0/24
//!                                           └─ husk-node2 ── lab 2: 172.30.0.12, pods 10.244.2.0/24
//! ```

use crate::finish::finish;
use anyhow::Result;
use std::process::Command;

const BRIDGE: &str = "husk-cluster";
/// Address of this machine, at which the API server and KubeVirt's programs listen.
pub const HOST: &str = "172.30.0.1";
/// Range of the Services' addresses.
pub const SERVICES: &str = "10.96.0.0/16";
/// Address of the Service of the API server.
pub const API_SERVICE: &str = "10.96.0.1";
/// Range of the pods of all nodes.
pub const PODS: &str = "10.244.0.0/16";

/// Addresses of a node.
#[derive(Debug, Clone)]
pub struct NodeNetwork {
    /// Name of the tap, whose other end is the lab's NIC.
    pub tap: String,
    pub mac: String,
    pub address: String,
    /// Range of the node's pods.
    pub pods: String,
    /// First address of the range, which is the node's own.
    pub gateway: String,
}

impl NodeNetwork {
    /// The network of node `number`.
    pub fn of(number: u32) -> Self {
        Self {
            tap: format!("husk-node{number}"),
            mac: format!("52:54:00:00:30:{number:02x}"),
            address: format!("172.30.0.{}", 10 + number),
            pods: format!("10.244.{number}.0/24"),
            gateway: format!("10.244.{number}.1"),
        }
    }
}

/// Adds the bridge, the taps of `nodes` nodes and the routes to their pods.
pub fn add(nodes: u32) -> Result<()> {
    ip(&["link", "add", BRIDGE, "type", "bridge"])?;
    ip(&["address", "add", &format!("{HOST}/24"), "dev", BRIDGE])?;
    ip(&["link", "set", BRIDGE, "up"])?;
    for number in 1..=nodes {
        let node = NodeNetwork::of(number);
        ip(&["tuntap", "add", "dev", &node.tap, "mode", "tap"])?;
        ip(&["link", "set", &node.tap, "master", BRIDGE, "up"])?;
        ip(&["route", "add", &node.pods, "via", &node.address])?;
    }
    Ok(())
}

/// Removes what [`add`] has added.
pub fn remove() {
    for number in 1..=2 {
        let _ = ip(&["link", "delete", &NodeNetwork::of(number).tap]);
    }
    let _ = ip(&["link", "delete", BRIDGE]);
}

fn ip(words: &[&str]) -> Result<()> {
    finish(Command::new("ip").args(words)).map(drop)
}
