//! `husk0`, the bridge that this machine's guests are on.

use ipnet::{IpNet, Ipv4Net};

use super::subnet;
use crate::network::dhcp::Resolver;
use crate::network::error::Fault;
use crate::network::netlink::{Change, Netlink};
use crate::network::nft::outward;
use crate::network::sysctl;

/// Its name.
pub(super) const BRIDGE: &str = "husk0";
/// Its name until it is as it should be.
pub(super) const UNFINISHED: &str = "husk0-new";

/// The alias of a bridge that Husk made, and so removes; another one stays.
const MADE: &str = "made by husk";
/// The same if IP forwarding was off before.
const MADE_AND_FORWARDS: &str = "made by husk, which switched ip_forward on";

const FORWARDING: &str = "ipv4/ip_forward";

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
pub(super) fn ensure(netlink: &Netlink) -> Result<Bridge, Fault> {
    if netlink.find(BRIDGE)?.is_none() {
        make(netlink)?;
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
    outward::masquerade(gateway, BRIDGE)?;
    if sysctl::is(FORWARDING, "0")? {
        if link.alias.as_deref() == Some(MADE) {
            // First, so that it is known whatever happens next.
            mark(netlink, link.index, MADE_AND_FORWARDS)?;
        }
        sysctl::set(FORWARDING, "1")?;
    }
    Ok(Bridge {
        index: link.index,
        mtu: link.mtu,
        gateway,
    })
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

/// Removes what [`ensure`] made if no guest is left. Under the lock.
pub(super) fn tidy(netlink: &Netlink) -> Result<(), Fault> {
    netlink.delete(UNFINISHED)?;
    let Some(link) = netlink.find(BRIDGE)? else {
        return Ok(());
    };
    if netlink.ports(link.index)? > 0 {
        return Ok(());
    }
    outward::stay()?;
    let alias = link.alias.as_deref();
    if alias == Some(MADE_AND_FORWARDS) {
        sysctl::set(FORWARDING, "0")?;
    }
    // Last, for it tells that the rest is to be done.
    match alias {
        Some(MADE | MADE_AND_FORWARDS) => netlink.delete(BRIDGE),
        _ => Ok(()),
    }
}
