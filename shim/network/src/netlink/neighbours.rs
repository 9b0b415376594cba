//! Neighbour table and bridge forwarding database.

use std::net::IpAddr;

use netlink_packet_route::AddressFamily;
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourState};

use super::connection::Netlink;
use crate::error::NetworkFault;
use crate::mac::MacAddr;
use crate::route::Neighbour;

impl Netlink {
    /// Permanent neighbours of a link.
    pub(crate) fn static_neighbours(&self, index: u32) -> Result<Vec<Neighbour>, NetworkFault> {
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let stream = self
                .handle
                .neighbours()
                .get()
                .set_address_family(family)
                .execute();
            for message in self.collect("reading neighbours", stream)? {
                if message.header.ifindex != index || message.header.state != NeighbourState::Permanent {
                    continue;
                }
                let mut address = None;
                let mut mac = None;
                for attribute in &message.attributes {
                    match attribute {
                        NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => {
                            address = Some(IpAddr::V4(*ip))
                        }
                        NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => {
                            address = Some(IpAddr::V6(*ip))
                        }
                        NeighbourAttribute::LinkLayerAddress(bytes) => mac = MacAddr::from_slice(bytes),
                        _ => {}
                    }
                }
                if let (Some(address), Some(mac)) = (address, mac) {
                    found.push(Neighbour { address, mac });
                }
            }
        }
        Ok(found)
    }

    /// Adds or replaces a permanent neighbour.
    pub(crate) fn add_neighbour(
        &self,
        index: u32,
        name: &str,
        neighbour: &Neighbour,
    ) -> Result<(), NetworkFault> {
        let request = self
            .handle
            .neighbours()
            .add(index, neighbour.address)
            .link_layer_address(&neighbour.mac.0)
            .replace();
        let what = format!("adding neighbour {} to {name}", neighbour.address);
        self.block_on(what, request.execute())
    }

    /// Adds a forwarding database entry: `mac` is behind this port.
    pub(crate) fn add_fdb_entry(&self, port: u32, name: &str, mac: MacAddr) -> Result<(), NetworkFault> {
        let request = self
            .handle
            .neighbours()
            .add_bridge(port, &mac.0)
            // NUD_NOARP: a static entry that is not an address of the bridge itself.
            .state(NeighbourState::Noarp)
            .flags(NeighbourFlags::Controller)
            .replace();
        self.block_on(format!("adding {mac} behind {name}"), request.execute())
    }
}
