//! Routes and static neighbours of a pod's device.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::mac::MacAddr;

/// A route through the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Where to.
    pub destination: IpNet,
    /// By whom; none if the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// From which address.
    pub source: Option<IpAddr>,
    /// Its metric.
    pub metric: Option<u32>,
    /// The gateway is on the link whatever the other routes say.
    pub onlink: bool,
    /// Who made it: a number of the kernel's list.
    pub protocol: u8,
}

/// A static entry of the neighbour table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Who.
    pub address: IpAddr,
    /// Where.
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
