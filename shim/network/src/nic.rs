//! The pod's NIC.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net};
use netlink_packet_route::link::LinkLayerType;
use serde::{Deserialize, Serialize};

use super::error::NetworkFault;
use super::mac::MacAddr;
use super::netlink::{Link, Netlink, saved_routes};
use super::route::{Neighbour, Route};

/// A pod's NIC, as the CNI plugin left it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodNic {
    pub name: String,
    /// Interface index, which renaming does not change.
    pub index: u32,
    pub mac: MacAddr,
    /// In bytes.
    pub mtu: u32,
    /// Addresses, without the link-local ones of IPv6.
    pub addresses: Vec<IpNet>,
    /// Routes through the NIC.
    pub routes: Vec<Route>,
    /// Permanent neighbour entries.
    pub neighbours: Vec<Neighbour>,
}

/// State that the NIC loses while a guest uses it, as rtnetlink messages.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedLink {
    pub(super) down: bool,
    /// One RTM_NEWADDR message each.
    pub(super) addresses: Vec<Vec<u8>>,
    /// One RTM_NEWROUTE message each, of all routing tables.
    pub(super) routes: Vec<Vec<u8>>,
}

impl PodNic {
    /// Reads the NIC of this name.
    ///
    /// # Errors
    /// The NIC does not exist, or is not an Ethernet device.
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

    /// The pod's first IPv4 address.
    pub fn ipv4(&self) -> Option<Ipv4Net> {
        self.addresses.iter().find_map(|address| match address {
            IpNet::V4(net) => Some(*net),
            IpNet::V6(_) => None,
        })
    }

    /// True if the pod has an IPv6 address.
    pub fn has_ipv6(&self) -> bool {
        self.addresses
            .iter()
            .any(|address| matches!(address, IpNet::V6(_)))
    }

    /// Static neighbours that a guest resolves by ARP.
    pub(super) fn arp_neighbours(&self) -> impl Iterator<Item = (Ipv4Addr, &Neighbour)> {
        self.neighbours
            .iter()
            .filter_map(|neighbour| match neighbour.address {
                // The kernel has permanent entries for multicast addresses, which it never resolves.
                IpAddr::V4(ip) if !ip.is_multicast() && neighbour.mac.is_unicast() => Some((ip, neighbour)),
                _ => None,
            })
    }
}

impl SavedLink {
    /// Reads the state of the NIC with this index.
    pub(super) fn of(netlink: &Netlink, index: u32) -> Result<SavedLink, NetworkFault> {
        let addresses = saved_routes::addresses(index)?;
        Ok(SavedLink {
            down: netlink.link_by_index(index)?.is_some_and(|link| !link.up),
            routes: saved_routes::routes(index, &addresses)?,
            addresses,
        })
    }
}

/// MAC address of an Ethernet device.
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
        let reason = format!("is not an Ethernet device ({kind}): add one, such as a veth");
        NetworkFault::unsuitable(&link.name, reason)
    })
}
