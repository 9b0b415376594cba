//! Links, addresses, routes and neighbours of the calling thread's network namespace.
//!
//! The one module that knows rtnetlink, which changes often. Calls block: they are made on a namespace's own thread.

use std::future::Future;
use std::net::IpAddr;

use futures_util::{Stream, TryStreamExt};
use ipnet::IpNet;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::AddressAttribute;
use rtnetlink::{Handle, LinkBridge, LinkBridgePort, LinkDummy, LinkUnspec};
use tokio::runtime::{Builder, Runtime};

use super::error::NetworkFault;
use super::mac::MacAddr;

mod link;
mod neighbours;
mod raw_message;
mod routes;
pub(super) mod saved_routes;
mod veth;

pub(super) use link::Link;
pub(super) use veth::Veth;

/// A connection to the kernel.
#[derive(Debug)]
pub(super) struct Netlink {
    runtime: Runtime,
    handle: Handle,
}

/// A change to one link; what is `None` stays.
#[derive(Debug, Default)]
pub(super) struct LinkChange<'a> {
    pub(super) name: Option<&'a str>,
    pub(super) mac: Option<MacAddr>,
    pub(super) mtu: Option<u32>,
    pub(super) bridge: Option<u32>,
    pub(super) alias: Option<&'a str>,
    pub(super) up: Option<bool>,
}

impl Netlink {
    /// Connects to the calling thread's namespace.
    pub(super) fn open() -> Result<Netlink, NetworkFault> {
        let what = || NetworkFault::kernel("opening a netlink socket");
        let runtime = Builder::new_current_thread()
            .enable_io()
            .build()
            .map_err(what())?;
        let _entered = runtime.enter();
        let (connection, handle, _) = rtnetlink::new_connection().map_err(what())?;
        drop(runtime.spawn(connection));
        drop(_entered);
        Ok(Netlink { runtime, handle })
    }

    /// The link of this name, if there is one.
    pub(super) fn link_by_name(&self, name: &str) -> Result<Option<Link>, NetworkFault> {
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

    /// The same, where it must be.
    pub(super) fn require_link(&self, name: &str) -> Result<Link, NetworkFault> {
        self.link_by_name(name)?.ok_or_else(|| NetworkFault::DeviceGone {
            device: name.to_owned(),
        })
    }

    /// Adds a bridge, down, that is to forward from the first moment and has this address whatever its ports have.
    pub(super) fn add_bridge(&self, name: &str, mac: MacAddr) -> Result<(), NetworkFault> {
        let message = LinkBridge::new(name)
            .address(mac.0.to_vec())
            .forward_delay(0)
            // The library brings bridges up.
            .down()
            .build();
        self.block_on(
            format!("adding {name}"),
            self.handle.link().add(message).execute(),
        )
    }

    /// Adds a device that only holds addresses: a dummy, or a bridge without ports where the kernel has no dummies.
    pub(super) fn add_placeholder(&self, name: &str) -> Result<(), NetworkFault> {
        let dummy = self.handle.link().add(LinkDummy::new(name).build());
        match self.block_on(format!("adding {name}"), dummy.execute()) {
            Err(fault) if fault.errno() == Some(libc::EOPNOTSUPP) => self.add_bridge(name, MacAddr::random()),
            done => done,
        }
    }

    /// Changes a link.
    pub(super) fn change(&self, index: u32, name: &str, change: LinkChange<'_>) -> Result<(), NetworkFault> {
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

    /// Brings a link up, or down.
    pub(super) fn set_up(&self, index: u32, name: &str, up: bool) -> Result<(), NetworkFault> {
        let change = LinkChange {
            up: Some(up),
            ..LinkChange::default()
        };
        self.change(index, name, change)
    }

    /// Whether the bridge learns who is behind this port.
    pub(super) fn set_learning(&self, port: u32, name: &str, learning: bool) -> Result<(), NetworkFault> {
        let message = LinkBridgePort::new(port).learning(learning).build();
        let request = self.handle.link().set_port(message);
        self.block_on(format!("setting the learning of {name}"), request.execute())
    }

    /// Lets the bridge answer ARP requests for neighbours of its own that are behind this port.
    pub(super) fn set_proxy_arp(&self, port: u32, name: &str) -> Result<(), NetworkFault> {
        // Without "wifi" no broadcast would reach the port any more.
        let message = LinkBridgePort::new(port).proxy_arp_wifi(true).build();
        let request = self.handle.link().set_port(message);
        self.block_on(format!("setting the proxy ARP of {name}"), request.execute())
    }

    /// Removes the link; one that is gone is no fault.
    pub(super) fn delete(&self, name: &str) -> Result<(), NetworkFault> {
        let Some(link) = self.link_by_name(name)? else {
            return Ok(());
        };
        let request = self.handle.link().del(link.index);
        self.block_on(format!("removing {name}"), request.execute())
    }

    /// Its addresses but the link-local ones of IPv6, in the kernel's order.
    pub(super) fn addresses(&self, index: u32) -> Result<Vec<IpNet>, NetworkFault> {
        let stream = self.handle.address().get().set_link_index_filter(index).execute();
        let messages = self.collect("reading addresses", stream)?;
        let address = |message: &netlink_packet_route::address::AddressMessage| {
            // The local address and that of the other end differ on point-to-point links only.
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

    /// Adds an address that nobody is asked about first.
    pub(super) fn add_address(&self, index: u32, name: &str, address: IpNet) -> Result<(), NetworkFault> {
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

    fn collect<T>(
        &self,
        what: &str,
        stream: impl Stream<Item = Result<T, rtnetlink::Error>>,
    ) -> Result<Vec<T>, NetworkFault> {
        self.block_on(what.to_owned(), stream.try_collect())
    }

    fn block_on<T>(
        &self,
        what: String,
        work: impl Future<Output = Result<T, rtnetlink::Error>>,
    ) -> Result<T, NetworkFault> {
        let refused = |error| match error {
            rtnetlink::Error::NetlinkError(message) => message.to_io(),
            other => std::io::Error::other(other),
        };
        self.runtime
            .block_on(work)
            .map_err(refused)
            .map_err(NetworkFault::kernel(what))
    }
}

/// The family of an address.
fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}
