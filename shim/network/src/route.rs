//! Routes and static neighbours of a pod's device.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::mac::MacAddr;

/// A route through the NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    pub destination: IpNet,
    /// `None` if the destination is on-link.
    pub gateway: Option<IpAddr>,
    /// Preferred source address.
    pub source: Option<IpAddr>,
    pub metric: Option<u32>,
    /// The gateway is on-link, whatever the other routes are.
    pub onlink: bool,
    /// Routing protocol number (`RTPROT_*`).
    pub protocol: u8,
}

/// Permanent entry of the neighbour table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    pub address: IpAddr,
    pub mac: MacAddr,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.destination)?;
        match self.gateway {
            Some(gateway) => write!(f, " via {gateway}"),
            None => Ok(()),
        }
    }
}
