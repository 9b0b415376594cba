//! `husk0`, the bridge that this machine's guests are on.

use std::ffi::CStr;
use std::net::Ipv4Addr;

use ipnet::{IpNet, Ipv4Net};

use super::state::State;
use super::{forwarding, kept, subnet};
use crate::dhcp::Resolver;
use crate::error::Fault;
use crate::netlink::{Change, Netlink};
use crate::nft::outward::{self, Table};
use crate::offload;

/// Its name.
pub(super) const BRIDGE: &str = "husk0";
/// Its name until it is as it should be.
pub(super) const UNFINISHED: &str = "husk0-new";

/// How its ports' names begin.
const PORT: &str = "husk";
/// The alias of a bridge that Husk made, and so removes; another one stays.
const MADE: &str = "made by husk";

/// Bytes of the largest packet, unless fewer leave the machine.
const MTU: u32 = 1500;
/// The fewest that IPv6 works with.
const LEAST_MTU: u32 = 1280;

/// The bridge as it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bridge {
    pub(super) index: u32,
    pub(super) mtu: u32,
    /// Its address, with the length of the network.
    pub(super) gateway: Ipv4Net,
}

/// Has a bridge with an address, from which packets leave this machine. One that is there keeps its network. Under the
/// lock.
pub(super) fn ensure(netlink: &Netlink, state: &mut State<'_>) -> Result<Bridge, Fault> {
    if netlink.find(BRIDGE)?.is_none() {
        make(netlink)?;
    } else if offload::driver(BRIDGE).is_ok_and(|driver| driver != "bridge") {
        return Err(Fault::Host(format!(
            "{BRIDGE} is no bridge: remove it by `ip link del {BRIDGE}`, or give it another name"
        )));
    }
    let link = netlink.get(BRIDGE)?;
    let gateway = netlink
        .addresses(link.index)?
        .into_iter()
        .find_map(|net| match net {
            IpNet::V4(net) => Some(net),
            IpNet::V6(_) => None,
        });
    let gateway = gateway.ok_or_else(|| {
        Fault::Host(format!(
            "{BRIDGE} has no IPv4 address: give it one, or remove it by `ip link del {BRIDGE}`"
        ))
    })?;
    netlink.set_up(link.index, BRIDGE, true)?;
    masquerade(gateway, state)?;
    forwarding::switch_on(state, link.index)?;
    Ok(Bridge {
        index: link.index,
        mtu: link.mtu,
        gateway,
    })
}

/// Translates what leaves `net`, by a table that is Husk's.
fn masquerade(net: Ipv4Net, state: &mut State<'_>) -> Result<(), Fault> {
    if state.done().table {
        return outward::masquerade(net, BRIDGE, Table::Own);
    }
    if outward::is_there()? {
        return Err(outward::foreign());
    }
    state.change(|done| done.table = true).map_err(kept())?;
    let added = outward::masquerade(net, BRIDGE, Table::New);
    if added.is_err() {
        // It was not added as a whole, so what is there is another's.
        state.change(|done| done.table = false).map_err(kept())?;
    }
    added
}

/// It has its name only when it is complete.
fn make(netlink: &Netlink) -> Result<(), Fault> {
    netlink.delete(UNFINISHED)?;
    let servers = Resolver::of_host(None).ipv4.into_iter().map(Ipv4Net::from);
    let taken: Vec<Ipv4Net> = netlink.routed()?.into_iter().chain(servers).collect();
    let net = subnet::choose(&taken).ok_or_else(|| {
        Fault::Host(format!(
            "no network is free for {BRIDGE}: make it with one, by `ip link add {BRIDGE} type bridge` and \
             `ip addr add ADDRESS/LENGTH dev {BRIDGE}`"
        ))
    })?;
    let gateway = net.hosts().next().unwrap_or(net.addr());
    let mtu = match netlink.uplink()? {
        Some(link) => netlink.mtu(link)?.clamp(LEAST_MTU, MTU),
        None => MTU,
    };
    netlink.add_bridge(UNFINISHED, subnet::mac(gateway))?;
    let index = netlink.get(UNFINISHED)?.index;
    mark(netlink, index, MADE)?;
    let gateway = Ipv4Net::new_assert(gateway, net.prefix_len());
    netlink.add_address(index, UNFINISHED, gateway.into())?;
    let change = Change {
        name: Some(BRIDGE),
        mtu: Some(mtu),
        ..Change::default()
    };
    netlink.change(index, UNFINISHED, change)
}

fn mark(netlink: &Netlink, index: u32, alias: &str) -> Result<(), Fault> {
    let change = Change {
        alias: Some(alias),
        ..Change::default()
    };
    netlink.change(index, BRIDGE, change)
}

/// Puts back what [`ensure`] did if no guest is left, whatever has become of the bridge. Under the lock.
pub(super) fn tidy(netlink: &Netlink, state: &mut State<'_>) -> Result<(), Fault> {
    netlink.delete(UNFINISHED)?;
    if guests_are_left()? {
        return Ok(());
    }
    if state.done().table {
        outward::stay()?;
        state.change(|done| done.table = false).map_err(kept())?;
    }
    forwarding::switch_back(state)?;
    let Some(link) = netlink.find(BRIDGE)? else {
        return Ok(());
    };
    // Somebody else may have taken it into use.
    if link.alias.as_deref() == Some(MADE) && netlink.ports(link.index)? == 0 {
        netlink.delete(BRIDGE)?;
    }
    Ok(())
}

/// What a guest's port is called.
pub(super) fn port(address: Ipv4Addr) -> String {
    format!("{PORT}{:08x}", u32::from(address))
}

fn guests_are_left() -> Result<bool, Fault> {
    let links = nix::net::if_::if_nameindex().map_err(Fault::kernel("reading links"))?;
    let is_port = |name: &CStr| {
        let digits = name.to_bytes().strip_prefix(PORT.as_bytes());
        digits.is_some_and(|digits| digits.len() == 8 && digits.iter().all(u8::is_ascii_hexdigit))
    };
    Ok(links.iter().any(|link| is_port(link.name())))
}
