//! The bridge binding: the pod's device and the tap become ports of one bridge, and the guest takes over the device's
//! addresses.
//!
//! ```text
//! host ── eth0-nic ── k6t-eth0 ── tap0 ── guest          eth0: holds the pod's addresses, down
//! ```
//!
//! Frames pass unchanged both ways. The pod itself keeps nothing that could answer in the guest's place.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::Ipv4Net;

use super::error::Fault;
use super::interface::Interface;
use super::mac::MacAddr;
use super::names::Devices;
use super::netlink::{Change, Netlink, kept};
use super::nic::{Kept, PodNic};
use super::{offload, sysctl, tap};

const ARP_IGNORE: &str = "ipv4/conf/all/arp_ignore";

/// Switches that are changed and outlive what is built, and how they were.
pub(super) fn switches(devices: &Devices) -> Result<Vec<(String, String)>, Fault> {
    sysctl::not_on(&[ARP_IGNORE, &disable_ipv6(&devices.nic)])
}

fn disable_ipv6(device: &str) -> String {
    format!("ipv6/conf/{device}/disable_ipv6")
}

/// Builds it from the device as the plugin left it.
pub(super) fn build(
    netlink: &Netlink,
    interface: &Interface,
    devices: &Devices,
    nic: &PodNic,
    kept: &Kept,
) -> Result<(), Fault> {
    let moved = take_over(netlink, devices, kept)?;
    netlink.add_bridge(&devices.bridge, MacAddr::random())?;
    no_ipv6(&devices.bridge)?;
    let bridge = netlink.get(&devices.bridge)?.index;
    enslave(netlink, bridge, moved, &devices.moved, nic.mtu)?;
    // Who is behind the pod's device is not learnt: a frame of the guest's that came back would move the guest there.
    netlink.set_learning(moved, &devices.moved, false)?;

    tap::create(&devices.tap, interface.queues, interface.owner)?;
    no_ipv6(&devices.tap)?;
    let guest = netlink.get(&devices.tap)?.index;
    enslave(netlink, bridge, guest, &devices.tap, nic.mtu)?;

    if !nic.addresses.is_empty() {
        hold_addresses(netlink, devices, nic)?;
    }
    if nic.ipv4().is_some() {
        // The pod's address is still one of the namespace's: without this the bridge would answer for it.
        sysctl::set(ARP_IGNORE, "1")?;
        let address = Ipv4Net::new_assert(interface.fake_address(), 32);
        netlink.add_address(bridge, &devices.bridge, address.into())?;
    }
    netlink.set_up(bridge, &devices.bridge, true)?;
    offload::no_tx_checksum(&devices.bridge)?;
    answer_for_neighbours(netlink, bridge, moved, devices, nic)
}

/// Empties the pod's device, renames it and gives it another Ethernet address, for its own is the guest's now.
fn take_over(netlink: &Netlink, devices: &Devices, kept: &Kept) -> Result<u32, Fault> {
    let index = netlink.get(&devices.nic)?.index;
    netlink.set_up(index, &devices.nic, false)?;
    kept::remove_addresses(&devices.nic, &kept.addresses)?;
    let change = Change {
        name: Some(&devices.moved),
        mac: Some(MacAddr::random()),
        ..Change::default()
    };
    netlink.change(index, &devices.nic, change)?;
    no_ipv6(&devices.moved)?;
    Ok(index)
}

pub(super) fn enslave(netlink: &Netlink, bridge: u32, port: u32, name: &str, mtu: u32) -> Result<(), Fault> {
    let change = Change {
        bridge: Some(bridge),
        mtu: Some(mtu),
        up: Some(true),
        ..Change::default()
    };
    netlink.change(port, name, change)
}

/// Ports and bridge would make themselves addresses, ask for routers and report memberships in the pod's name.
fn no_ipv6(device: &str) -> Result<(), Fault> {
    sysctl::set(&disable_ipv6(device), "1")
}

/// A device that is down shows the pod's addresses to whoever looks for them, as the kubelet and plugins do.
fn hold_addresses(netlink: &Netlink, devices: &Devices, nic: &PodNic) -> Result<(), Fault> {
    netlink.add_placeholder(&devices.nic)?;
    let index = netlink.get(&devices.nic)?.index;
    netlink.change(
        index,
        &devices.nic,
        Change {
            mtu: Some(nic.mtu),
            ..Change::default()
        },
    )?;
    for address in &nic.addresses {
        netlink.add_address(index, &devices.nic, *address)?;
    }
    Ok(())
}

/// The pod may reach its gateway by a static neighbour because nobody answers ARP for it. The guest has no such entry
/// and asks: the bridge answers in the neighbour's place, which it must know to be behind the pod's device.
fn answer_for_neighbours(
    netlink: &Netlink,
    bridge: u32,
    moved: u32,
    devices: &Devices,
    nic: &PodNic,
) -> Result<(), Fault> {
    let own: Vec<Ipv4Addr> = nic
        .addresses
        .iter()
        .filter_map(|net| match net.addr() {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(_) => None,
        })
        .collect();
    let mut any = false;
    for (ip, neighbour) in nic.arp_neighbours() {
        if own.contains(&ip) {
            continue;
        }
        netlink.add_neighbour(bridge, &devices.bridge, neighbour)?;
        netlink.add_station(moved, &devices.moved, neighbour.mac)?;
        any = true;
    }
    match any {
        true => netlink.set_proxy_arp(moved, &devices.moved),
        false => Ok(()),
    }
}

/// Removes whatever of it was built, and gives the pod's device its name back.
pub(super) fn dismantle(netlink: &Netlink, devices: &Devices, nic: &PodNic) -> Result<(), Fault> {
    netlink.delete(&devices.tap)?;
    netlink.delete(&devices.bridge)?;
    let placeholder = netlink.find(&devices.nic)?.filter(|link| link.index != nic.index);
    if placeholder.is_some() {
        netlink.delete(&devices.nic)?;
    }
    let Some(moved) = netlink.find(&devices.moved)? else {
        return Ok(());
    };
    netlink.set_up(moved.index, &devices.moved, false)?;
    let name = Change {
        name: Some(&devices.nic),
        ..Change::default()
    };
    netlink.change(moved.index, &devices.moved, name)
}

/// Makes the pod's device what it was, once it has its name and the namespace its switches. What fails is told after
/// everything else is done.
pub(super) fn give_back(
    netlink: &Netlink,
    devices: &Devices,
    nic: &PodNic,
    kept: &Kept,
) -> Result<(), Fault> {
    let Some(link) = netlink.find(&devices.nic)? else {
        // It goes with the pod, which may be going.
        return Ok(());
    };
    let change = Change {
        mac: Some(nic.mac),
        up: (!kept.down).then_some(true),
        ..Change::default()
    };
    netlink.change(link.index, &nic.name, change)?;
    // To one that is up, or IPv6 makes no route for an address that is there for a time.
    let added = kept::add_addresses(&nic.name, &kept.addresses);
    let routed = kept::restore_routes(link.index, &nic.name, &kept.routes, &kept.addresses);
    let settled = kept::settle(&nic.name, &kept.addresses);
    let known = nic
        .neighbours
        .iter()
        .try_for_each(|neighbour| netlink.add_neighbour(link.index, &nic.name, neighbour));
    added.and(routed).and(settled).and(known)
}
