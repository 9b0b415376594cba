//! `husk0`, the bridge of the host's guests.

use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};

use super::host_state::{HostState, save_error};
use super::{forwarding, subnet};
use crate::dhcp::DnsConfig;
use crate::error::NetworkFault;
use crate::ethtool;
use crate::netlink::{LinkChange, Netlink};
use crate::nft::egress::{self, EgressTable};
use crate::sysctl;

pub(super) const BRIDGE: &str = "husk0";
/// Name of the bridge until it is configured.
pub(super) const NEW_BRIDGE: &str = "husk0-new";

/// Prefix of its ports' names.
const PORT_PREFIX: &str = "husk";
/// Alias of a bridge that Husk made and therefore removes.
const HUSK_ALIAS: &str = "made by husk";

/// Default MTU, in bytes. A smaller MTU of the uplink wins.
const MTU: u32 = 1500;
/// Smallest MTU of IPv6, in bytes.
const MIN_MTU: u32 = 1280;

#[derive(Debug, Clone, Copy)]
pub(super) struct Bridge {
    pub(super) index: u32,
    pub(super) mtu: u32,
    /// Address and prefix length of the bridge.
    pub(super) gateway: Ipv4Net,
}

/// True if there is a bridge, finished or not.
pub(super) fn exists() -> bool {
    // By netlink, not SIOCGIFINDEX: for a name that does not exist that ioctl runs modprobe twice.
    let is_there = |netlink: Netlink| {
        let of = |name| netlink.link_by_name(name).is_ok_and(|link| link.is_some());
        of(BRIDGE) || of(NEW_BRIDGE)
    };
    Netlink::open().is_ok_and(is_there)
}

/// Creates the bridge if needed, and enables NAT and forwarding for it. An existing bridge keeps its network. The
/// caller holds the lock.
pub(super) fn ensure(netlink: &Netlink, state: &mut HostState<'_>) -> Result<Bridge, NetworkFault> {
    if netlink.link_by_name(BRIDGE)?.is_none() {
        make(netlink)?;
    } else if ethtool::driver(BRIDGE).is_ok_and(|driver| driver != "bridge") {
        return Err(NetworkFault::Host(format!(
            "{BRIDGE} is not a bridge: remove it by `ip link del {BRIDGE}`, or give it another name"
        )));
    }
    let link = netlink.require_link(BRIDGE)?;
    let gateway = netlink
        .addresses(link.index)?
        .into_iter()
        .find_map(|net| match net {
            IpNet::V4(net) => Some(net),
            IpNet::V6(_) => None,
        });
    let gateway = gateway.ok_or_else(|| {
        NetworkFault::Host(format!(
            "{BRIDGE} has no IPv4 address: give it one, or remove it by `ip link del {BRIDGE}`"
        ))
    })?;
    if link.alias.as_deref() == Some(HUSK_ALIAS) {
        no_ipv6(BRIDGE)?;
    }
    netlink.set_up(link.index, BRIDGE, true)?;
    forwarding::record(state, link.index)?;
    masquerade(gateway, state)?;
    forwarding::enable(state)?;
    Ok(Bridge {
        index: link.index,
        mtu: link.mtu,
        gateway,
    })
}

/// Adds or replaces Husk's NAT table for `net`.
fn masquerade(net: Ipv4Net, state: &mut HostState<'_>) -> Result<(), NetworkFault> {
    let add =
        |state: &HostState<'_>, table| egress::masquerade(net, BRIDGE, &forwarding::switched(state)?, table);
    if state.done().table {
        return add(state, EgressTable::Own);
    }
    if egress::table_exists()? {
        return Err(egress::foreign_table());
    }
    state.change(|done| done.table = true).map_err(save_error())?;
    let added = add(state, EgressTable::New);
    if added.is_err() {
        // The transaction failed as a whole, so an existing table is another program's.
        state.change(|done| done.table = false).map_err(save_error())?;
    }
    added
}

/// Creates the bridge under a temporary name and renames it when it is configured.
fn make(netlink: &Netlink) -> Result<(), NetworkFault> {
    netlink.delete(NEW_BRIDGE)?;
    let servers = DnsConfig::for_host(None).ipv4.into_iter().map(Ipv4Net::from);
    let taken: Vec<Ipv4Net> = netlink.routed()?.into_iter().chain(servers).collect();
    let net = subnet::choose(&taken).ok_or_else(|| {
        NetworkFault::Host(format!(
            "no network is free for {BRIDGE}: make it with one, by `ip link add {BRIDGE} type bridge` and \
             `ip addr add ADDRESS/LENGTH dev {BRIDGE}`"
        ))
    })?;
    let gateway = net.hosts().next().unwrap_or(net.addr());
    let mtu = match netlink.uplink()? {
        Some(link) => netlink.mtu(link)?.clamp(MIN_MTU, MTU),
        None => MTU,
    };
    netlink.add_bridge(NEW_BRIDGE, subnet::mac(gateway))?;
    no_ipv6(NEW_BRIDGE)?;
    let index = netlink.require_link(NEW_BRIDGE)?.index;
    mark(netlink, index, HUSK_ALIAS)?;
    let gateway = Ipv4Net::new_assert(gateway, net.prefix_len());
    netlink.add_address(index, NEW_BRIDGE, gateway.into())?;
    let change = LinkChange {
        name: Some(BRIDGE),
        mtu: Some(mtu),
        ..LinkChange::default()
    };
    netlink.change(index, NEW_BRIDGE, change)
}

/// Disables IPv6 on a device of the host: a guest that advertises itself as a router would become the host's.
pub(super) fn no_ipv6(device: &str) -> Result<(), NetworkFault> {
    sysctl::set(&format!("ipv6/conf/{device}/disable_ipv6"), "1")
}

fn mark(netlink: &Netlink, index: u32, alias: &str) -> Result<(), NetworkFault> {
    let change = LinkChange {
        alias: Some(alias),
        ..LinkChange::default()
    };
    netlink.change(index, BRIDGE, change)
}

/// Reverts [`ensure`] if no guest is left, whether or not the bridge still exists. The caller holds the lock.
pub(super) fn clean_up(netlink: &Netlink, state: &mut HostState<'_>) -> Result<(), NetworkFault> {
    netlink.delete(NEW_BRIDGE)?;
    if guests_are_left(netlink)? {
        return Ok(());
    }
    if state.done().table {
        egress::remove()?;
        state.change(|done| done.table = false).map_err(save_error())?;
    }
    forwarding::restore(state)?;
    let Some(link) = netlink.link_by_name(BRIDGE)? else {
        return Ok(());
    };
    // Another program may use the bridge.
    if link.alias.as_deref() == Some(HUSK_ALIAS) && netlink.ports(link.index)? == 0 {
        netlink.delete(BRIDGE)?;
    }
    Ok(())
}

/// Name of a guest's port.
pub(super) fn port_name(address: Ipv4Addr) -> String {
    format!("{PORT_PREFIX}{:08x}", u32::from(address))
}

fn guests_are_left(netlink: &Netlink) -> Result<bool, NetworkFault> {
    let is_port = |name: &str| {
        let digits = name.strip_prefix(PORT_PREFIX);
        digits.is_some_and(|digits| digits.len() == 8 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    Ok(netlink.links()?.iter().any(|link| is_port(&link.name)))
}
