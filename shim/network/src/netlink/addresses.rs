//! Addresses of links.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_route::address::AddressAttribute;

use super::connection::Netlink;
use crate::error::NetworkFault;

impl Netlink {
    /// Addresses of a link in the kernel's order, without the link-local ones of IPv6.
    pub(crate) fn addresses(&self, index: u32) -> Result<Vec<IpNet>, NetworkFault> {
        let stream = self.handle.address().get().set_link_index_filter(index).execute();
        let messages = self.collect("reading addresses", stream)?;
        let address = |message: &netlink_packet_route::address::AddressMessage| {
            // Local and peer address differ on point-to-point links only.
            let local = message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Local(address) => Some(*address),
                _ => None,
            });
            let address = local.or_else(|| {
                message.attributes.iter().find_map(|attribute| match attribute {
                    AddressAttribute::Address(address) => Some(*address),
                    _ => None,
                })
            })?;
            IpNet::new(address, message.header.prefix_len).ok()
        };
        let link_local = |net: &IpNet| matches!(net.addr(), IpAddr::V6(ip) if ip.is_unicast_link_local());
        let messages = messages.iter().filter(|message| message.header.index == index);
        Ok(messages
            .filter_map(address)
            .filter(|net| !link_local(net))
            .collect())
    }

    /// Adds an address without duplicate address detection.
    pub(crate) fn add_address(&self, index: u32, name: &str, address: IpNet) -> Result<(), NetworkFault> {
        let mut request = self
            .handle
            .address()
            .add(index, address.addr(), address.prefix_len());
        if address.addr().is_ipv6() {
            let flags = netlink_packet_route::address::AddressFlags::Nodad;
            request
                .message_mut()
                .attributes
                .push(AddressAttribute::Flags(flags));
        }
        self.block_on(format!("adding {address} to {name}"), request.execute())
    }
}
