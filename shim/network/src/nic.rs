//! What the container network plugin gave the pod.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};
use netlink_packet_route::link::LinkLayerType;
use serde::{Deserialize, Serialize};

use super::error::NetworkFault;
use super::mac::MacAddr;
use super::netlink::{Link, Netlink, saved_routes};
use super::route::{Neighbour, Route};

/// A pod's device, as the plugin left it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodNic {
    /// Its name.
    pub name: String,
    /// Its number, which it keeps under every name.
    pub index: u32,
    /// Its Ethernet address.
    pub mac: MacAddr,
    /// Bytes of the largest packet.
    pub mtu: u32,
    /// Its addresses, but IPv6's link-local ones.
    pub addresses: Vec<IpNet>,
    /// The routes through it.
    pub routes: Vec<Route>,
    /// Neighbours that do not answer for themselves, or need not.
    pub neighbours: Vec<Neighbour>,
}

/// What is lost of a device while a guest has it, as the kernel tells it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedLink {
    /// Whether it was down.
    pub(super) down: bool,
    /// Its addresses, each a message of rtnetlink.
    pub(super) addresses: Vec<Vec<u8>>,
    /// Its routes, in whichever table.
    pub(super) routes: Vec<Vec<u8>>,
}

impl PodNic {
    /// Looks at the device of this name.
    pub(super) fn discover(netlink: &Netlink, name: &str) -> Result<PodNic, NetworkFault> {
        let link = netlink
            .link_by_name(name)?
            .ok_or_else(|| NetworkFault::NicNotFound(name.to_owned()))?;
        Ok(PodNic {
            name: name.to_owned(),
            index: link.index,
            mac: ethernet_address(&link)?,
            mtu: link.mtu,
            addresses: netlink.addresses(link.index)?,
            routes: netlink.routes(link.index)?,
            neighbours: netlink.static_neighbours(link.index)?,
        })
    }

    /// The pod's IPv4 address.
    pub fn ipv4(&self) -> Option<Ipv4Net> {
        self.addresses.iter().find_map(|address| match address {
            IpNet::V4(net) => Some(*net),
            IpNet::V6(_) => None,
        })
    }

    /// Whether the pod speaks IPv6.
    pub fn has_ipv6(&self) -> bool {
        self.addresses
            .iter()
            .any(|address| matches!(address, IpNet::V6(_)))
    }

    /// The static neighbours that a guest asks for by ARP.
    pub(super) fn arp_neighbours(&self) -> impl Iterator<Item = (Ipv4Addr, &Neighbour)> {
        self.neighbours
            .iter()
            .filter_map(|neighbour| match neighbour.address {
                // The kernel has such entries for what it never asks.
                IpAddr::V4(ip) if !ip.is_multicast() && neighbour.mac.is_unicast() => Some((ip, neighbour)),
                _ => None,
            })
    }
}

impl SavedLink {
    /// Looks at the device of this number.
    pub(super) fn of(netlink: &Netlink, index: u32) -> Result<SavedLink, NetworkFault> {
        let addresses = saved_routes::addresses(index)?;
        Ok(SavedLink {
            down: netlink.link_by_index(index)?.is_some_and(|link| !link.up),
            routes: saved_routes::routes(index, &addresses)?,
            addresses,
        })
    }
}

/// The Ethernet address of a device that has one.
fn ethernet_address(link: &Link) -> Result<MacAddr, NetworkFault> {
    let what = match (link.layer, link.kind.as_str()) {
        (LinkLayerType::Ether, _) => link.mac,
        (LinkLayerType::Loopback, _) => {
            return Err(NetworkFault::unsuitable(
                &link.name,
                "is the loopback device: name another one",
            ));
        }
        _ => None,
    };
    what.ok_or_else(|| {
        let kind = match link.kind.as_str() {
            "" => format!("{:?}", link.layer).to_lowercase(),
            kind => kind.to_owned(),
        };
        let reason =
            format!("is no Ethernet device ({kind}), and a guest takes no other: add one, such as a veth");
        NetworkFault::unsuitable(&link.name, reason)
    })
}
