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

use super::device_names::DeviceNames;
use super::error::NetworkFault;
use super::interface::Interface;
use super::mac::MacAddr;
use super::netlink::{LinkChange, Netlink, saved_routes};
use super::nic::{PodNic, SavedLink};
use super::{ethtool, sysctl, tap};

const ARP_IGNORE: &str = "ipv4/conf/all/arp_ignore";

/// Switches that are changed and outlive what is built, and how they were.
pub(super) fn sysctls_to_save(devices: &DeviceNames) -> Result<Vec<(String, String)>, NetworkFault> {
    sysctl::not_on(&[ARP_IGNORE, &disable_ipv6(&devices.nic)])
}

fn disable_ipv6(device: &str) -> String {
    format!("ipv6/conf/{device}/disable_ipv6")
}

/// Builds it from the device as the plugin left it.
pub(super) fn build(
    netlink: &Netlink,
    interface: &Interface,
    devices: &DeviceNames,
    nic: &PodNic,
    saved: &SavedLink,
) -> Result<(), NetworkFault> {
    let moved = release_nic(netlink, devices, saved)?;
    netlink.add_bridge(&devices.bridge, MacAddr::random())?;
    no_ipv6(&devices.bridge)?;
    let bridge = netlink.require_link(&devices.bridge)?.index;
    enslave(netlink, bridge, moved, &devices.moved_nic, nic.mtu)?;
    // Who is behind the pod's device is not learnt: a frame of the guest's that came back would move the guest there.
    netlink.set_learning(moved, &devices.moved_nic, false)?;

    tap::create(&devices.tap, interface.queues, interface.owner)?;
    no_ipv6(&devices.tap)?;
    let guest = netlink.require_link(&devices.tap)?.index;
    enslave(netlink, bridge, guest, &devices.tap, nic.mtu)?;

    if !nic.addresses.is_empty() {
        add_placeholder(netlink, devices, nic)?;
    }
    if nic.ipv4().is_some() {
        // The pod's address is still one of the namespace's: without this the bridge would answer for it.
        sysctl::set(ARP_IGNORE, "1")?;
        let address = Ipv4Net::new_assert(interface.fake_address(), 32);
        netlink.add_address(bridge, &devices.bridge, address.into())?;
    }
    netlink.set_up(bridge, &devices.bridge, true)?;
    ethtool::disable_tx_checksum(&devices.bridge)?;
    answer_for_neighbours(netlink, bridge, moved, devices, nic)
}

/// Empties the pod's device, renames it and gives it another Ethernet address, for its own is the guest's now.
fn release_nic(netlink: &Netlink, devices: &DeviceNames, saved: &SavedLink) -> Result<u32, NetworkFault> {
    let index = netlink.require_link(&devices.nic)?.index;
    netlink.set_up(index, &devices.nic, false)?;
    saved_routes::remove_addresses(&devices.nic, &saved.addresses)?;
    let change = LinkChange {
        name: Some(&devices.moved_nic),
        mac: Some(MacAddr::random()),
        ..LinkChange::default()
    };
    netlink.change(index, &devices.nic, change)?;
    no_ipv6(&devices.moved_nic)?;
    Ok(index)
}

pub(super) fn enslave(
    netlink: &Netlink,
    bridge: u32,
    port: u32,
    name: &str,
    mtu: u32,
) -> Result<(), NetworkFault> {
    let change = LinkChange {
        bridge: Some(bridge),
        mtu: Some(mtu),
        up: Some(true),
        ..LinkChange::default()
    };
    netlink.change(port, name, change)
}

/// Ports and bridge would make themselves addresses, ask for routers and report memberships in the pod's name.
fn no_ipv6(device: &str) -> Result<(), NetworkFault> {
    sysctl::set(&disable_ipv6(device), "1")
}

/// A device that is down shows the pod's addresses to whoever looks for them, as the kubelet and plugins do.
fn add_placeholder(netlink: &Netlink, devices: &DeviceNames, nic: &PodNic) -> Result<(), NetworkFault> {
    netlink.add_placeholder(&devices.nic)?;
    let index = netlink.require_link(&devices.nic)?.index;
    netlink.change(
        index,
        &devices.nic,
        LinkChange {
            mtu: Some(nic.mtu),
            ..LinkChange::default()
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
    devices: &DeviceNames,
    nic: &PodNic,
) -> Result<(), NetworkFault> {
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
        netlink.add_fdb_entry(moved, &devices.moved_nic, neighbour.mac)?;
        any = true;
    }
    match any {
        true => netlink.set_proxy_arp(moved, &devices.moved_nic),
        false => Ok(()),
    }
}

/// Removes whatever of it was built, and gives the pod's device its name back.
pub(super) fn remove_devices(
    netlink: &Netlink,
    devices: &DeviceNames,
    nic: &PodNic,
) -> Result<(), NetworkFault> {
    netlink.delete(&devices.tap)?;
    netlink.delete(&devices.bridge)?;
    let placeholder = netlink
        .link_by_name(&devices.nic)?
        .filter(|link| link.index != nic.index);
    if placeholder.is_some() {
        netlink.delete(&devices.nic)?;
    }
    let Some(moved) = netlink.link_by_name(&devices.moved_nic)? else {
        return Ok(());
    };
    netlink.set_up(moved.index, &devices.moved_nic, false)?;
    let name = LinkChange {
        name: Some(&devices.nic),
        ..LinkChange::default()
    };
    netlink.change(moved.index, &devices.moved_nic, name)
}

/// Makes the pod's device what it was, once it has its name and the namespace its switches. What fails is told after
/// everything else is done.
pub(super) fn restore_nic(
    netlink: &Netlink,
    devices: &DeviceNames,
    nic: &PodNic,
    saved: &SavedLink,
) -> Result<(), NetworkFault> {
    let Some(link) = netlink.link_by_name(&devices.nic)? else {
        // It goes with the pod, which may be going.
        return Ok(());
    };
    let change = LinkChange {
        mac: Some(nic.mac),
        up: (!saved.down).then_some(true),
        ..LinkChange::default()
    };
    netlink.change(link.index, &nic.name, change)?;
    // To one that is up, or IPv6 makes no route for an address that is there for a time.
    let added = saved_routes::add_addresses(&nic.name, &saved.addresses);
    let routed = saved_routes::restore_routes(link.index, &nic.name, &saved.routes, &saved.addresses);
    let settled = saved_routes::restore_address_flags(&nic.name, &saved.addresses);
    let known = nic
        .neighbours
        .iter()
        .try_for_each(|neighbour| netlink.add_neighbour(link.index, &nic.name, neighbour));
    added.and(routed).and(settled).and(known)
}
