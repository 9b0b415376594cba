//! Requests on links.

use futures_util::TryStreamExt;
use netlink_packet_route::link::InfoBridge;
use rtnetlink::{LinkBridge, LinkBridgePort, LinkDummy, LinkUnspec};

use super::connection::Netlink;
use super::link::Link;
use crate::error::NetworkFault;
use crate::mac::MacAddr;

/// Limit for MAC addresses that a bridge learns, of which a guest may send any number. Linux knows it since 6.7.
const MAX_LEARNED: u32 = 16 << 10;

/// A change to one link; `None` leaves a property as it is.
#[derive(Debug, Default)]
pub(crate) struct LinkChange<'a> {
    pub(crate) name: Option<&'a str>,
    pub(crate) mac: Option<MacAddr>,
    pub(crate) mtu: Option<u32>,
    pub(crate) bridge: Option<u32>,
    pub(crate) alias: Option<&'a str>,
    pub(crate) up: Option<bool>,
}

impl Netlink {
    pub(crate) fn link_by_name(&self, name: &str) -> Result<Option<Link>, NetworkFault> {
        let mut links = Box::pin(self.handle.link().get().match_name(name.to_owned()).execute());
        let found = self.block_on(
            format!("looking for {name}"),
            async move { links.try_next().await },
        );
        match found {
            Ok(message) => Ok(message.map(|message| Link::of(&message))),
            Err(fault) if fault.errno() == Some(libc::ENODEV) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    pub(crate) fn link_by_index(&self, index: u32) -> Result<Option<Link>, NetworkFault> {
        let mut links = Box::pin(self.handle.link().get().match_index(index).execute());
        let found = self.block_on("reading links".to_owned(), async move { links.try_next().await });
        match found {
            Ok(message) => Ok(message.map(|message| Link::of(&message))),
            Err(fault) if fault.errno() == Some(libc::ENODEV) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    pub(crate) fn links(&self) -> Result<Vec<Link>, NetworkFault> {
        let links = self.handle.link().get().execute();
        self.collect("reading links", links.map_ok(|message| Link::of(&message)))
    }

    /// Looks up a link that must exist.
    pub(crate) fn require_link(&self, name: &str) -> Result<Link, NetworkFault> {
        self.link_by_name(name)?.ok_or_else(|| NetworkFault::DeviceGone {
            device: name.to_owned(),
        })
    }

    /// Adds a bridge that is down, forwards without delay and keeps this MAC address whatever its ports have.
    pub(crate) fn add_bridge(&self, name: &str, mac: MacAddr) -> Result<(), NetworkFault> {
        let message = LinkBridge::new(name)
            .address(mac.0.to_vec())
            .forward_delay(0)
            .append_info_data(InfoBridge::FdbMaxLearned(MAX_LEARNED))
            // The library sets new bridges up by default.
            .down()
            .build();
        self.block_on(
            format!("adding {name}"),
            self.handle.link().add(message).execute(),
        )
    }

    /// Adds a device that only holds addresses: a dummy, or a bridge without ports if the kernel has no dummy driver.
    pub(crate) fn add_placeholder(&self, name: &str) -> Result<(), NetworkFault> {
        let dummy = self.handle.link().add(LinkDummy::new(name).build());
        match self.block_on(format!("adding {name}"), dummy.execute()) {
            Err(fault) if fault.errno() == Some(libc::EOPNOTSUPP) => self.add_bridge(name, MacAddr::random()),
            done => done,
        }
    }

    pub(crate) fn change(&self, index: u32, name: &str, change: LinkChange<'_>) -> Result<(), NetworkFault> {
        let mut message = LinkUnspec::new_with_index(index);
        if let Some(name) = change.name {
            message = message.name(name);
        }
        if let Some(mac) = change.mac {
            message = message.address(mac.0.to_vec());
        }
        if let Some(mtu) = change.mtu {
            message = message.mtu(mtu);
        }
        if let Some(bridge) = change.bridge {
            message = message.controller(bridge);
        }
        if let Some(alias) = change.alias {
            message = message.alias(alias);
        }
        message = match change.up {
            Some(true) => message.up(),
            Some(false) => message.down(),
            None => message,
        };
        let request = self.handle.link().change(message.build());
        self.block_on(format!("changing {name}"), request.execute())
    }

    pub(crate) fn set_up(&self, index: u32, name: &str, up: bool) -> Result<(), NetworkFault> {
        let change = LinkChange {
            up: Some(up),
            ..LinkChange::default()
        };
        self.change(index, name, change)
    }

    /// Enables or disables learning on a bridge port.
    pub(crate) fn set_learning(&self, port: u32, name: &str, learning: bool) -> Result<(), NetworkFault> {
        let message = LinkBridgePort::new(port).learning(learning).build();
        let request = self.handle.link().set_port(message);
        self.block_on(format!("setting the learning of {name}"), request.execute())
    }

    /// Makes the bridge answer ARP requests for its neighbours behind this port.
    pub(crate) fn set_proxy_arp(&self, port: u32, name: &str) -> Result<(), NetworkFault> {
        // `proxy_arp` instead of `proxy_arp_wifi` would keep broadcasts from the port.
        let message = LinkBridgePort::new(port).proxy_arp_wifi(true).build();
        let request = self.handle.link().set_port(message);
        self.block_on(format!("setting the proxy ARP of {name}"), request.execute())
    }

    /// Removes a link, if it exists.
    pub(crate) fn delete(&self, name: &str) -> Result<(), NetworkFault> {
        let Some(link) = self.link_by_name(name)? else {
            return Ok(());
        };
        let request = self.handle.link().del(link.index);
        self.block_on(format!("removing {name}"), request.execute())
    }
}
