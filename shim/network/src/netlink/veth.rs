//! veth pairs, and the ports of a bridge.

use std::os::fd::{AsFd, AsRawFd};

use netlink_packet_route::link::{InfoData, InfoVeth};
use rtnetlink::{LinkUnspec, LinkVeth};

use super::connection::Netlink;
use crate::error::NetworkFault;
use crate::mac::MacAddr;
use crate::netns::Netns;

/// A veth pair: a bridge port in this namespace, and its peer in another.
#[derive(Debug)]
pub(crate) struct Veth<'a> {
    pub(crate) name: &'a str,
    pub(crate) bridge: u32,
    pub(crate) mtu: u32,
    pub(crate) netns: &'a Netns,
    pub(crate) peer: &'a str,
    pub(crate) peer_mac: MacAddr,
}

impl Netlink {
    /// Adds the pair with this end up. Returns false if the name is taken.
    pub(crate) fn add_veth(&self, veth: &Veth<'_>) -> Result<bool, NetworkFault> {
        let peer = LinkUnspec::new_with_name(veth.peer)
            .address(veth.peer_mac.0.to_vec())
            .mtu(veth.mtu)
            .setns_by_fd(veth.netns.as_fd().as_raw_fd())
            .build();
        let message = LinkVeth::new(veth.name, veth.peer)
            .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
            .controller(veth.bridge)
            .mtu(veth.mtu)
            .up()
            .build();
        let request = self.handle.link().add(message);
        match self.block_on(format!("adding {}", veth.name), request.execute()) {
            Err(fault) if fault.errno() == Some(libc::EEXIST) => Ok(false),
            done => done.map(|()| true),
        }
    }

    /// MTU of a link, in bytes.
    pub(crate) fn mtu(&self, index: u32) -> Result<u32, NetworkFault> {
        Ok(self.link_by_index(index)?.map_or(0, |link| link.mtu))
    }

    /// Number of a bridge's ports.
    pub(crate) fn ports(&self, bridge: u32) -> Result<usize, NetworkFault> {
        let links = self.links()?;
        Ok(links.iter().filter(|link| link.bridge == Some(bridge)).count())
    }
}
