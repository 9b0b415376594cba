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

/// Sysctls that the binding sets and that outlive its devices, with their old values.
pub(super) fn sysctls_to_save(devices: &DeviceNames) -> Result<Vec<(String, String)>, NetworkFault> {
    sysctl::not_on(&[ARP_IGNORE, &disable_ipv6(&devices.nic)])
}

fn disable_ipv6(device: &str) -> String {
    format!("ipv6/conf/{device}/disable_ipv6")
}

/// Builds the binding from the NIC as the CNI plugin left it.
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
    // Learning is off on both ports. A frame of the guest that came back would move the guest's address to the first;
    // on the second, the guest would have the kernel keep any number of addresses.
    netlink.set_learning(moved, &devices.moved_nic, false)?;

    tap::create(&devices.tap, interface.queues, interface.owner)?;
    no_ipv6(&devices.tap)?;
    let guest = netlink.require_link(&devices.tap)?.index;
    enslave(netlink, bridge, guest, &devices.tap, nic.mtu)?;
    netlink.set_learning(guest, &devices.tap, false)?;

    if !nic.addresses.is_empty() {
        add_placeholder(netlink, devices, nic)?;
    }
    if nic.ipv4().is_some() {
        // The pod's address is still in this namespace. Without arp_ignore the bridge would answer ARP for it.
        sysctl::set(ARP_IGNORE, "1")?;
        let address = Ipv4Net::new_assert(interface.fake_address(), 32);
        netlink.add_address(bridge, &devices.bridge, address.into())?;
    }
    netlink.set_up(bridge, &devices.bridge, true)?;
    ethtool::disable_tx_checksum(&devices.bridge)?;
    answer_for_neighbours(netlink, bridge, moved, devices, nic)
}

/// Removes the addresses of the pod's NIC, renames it and gives it another MAC address: the guest uses the old one.
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

/// Disables IPv6 on a port or bridge, which would otherwise create addresses, solicit routers and report multicast
/// memberships in the pod's name.
fn no_ipv6(device: &str) -> Result<(), NetworkFault> {
    sysctl::set(&disable_ipv6(device), "1")
}

/// Adds a device that is down and holds the pod's addresses, where the kubelet and CNI plugins look for them.
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

/// Makes the bridge answer ARP for static neighbours. A pod may reach its gateway by a static neighbour entry because
/// nobody answers ARP for it; the guest has no such entry. The bridge must know that the neighbour is behind the pod's
/// NIC.
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

/// Removes the devices that exist, and gives the pod's NIC its name back.
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

/// Restores the MAC address, addresses, routes and neighbours of the pod's NIC, after its name and the sysctls.
/// Continues after errors and returns the first.
pub(super) fn restore_nic(
    netlink: &Netlink,
    devices: &DeviceNames,
    nic: &PodNic,
    saved: &SavedLink,
) -> Result<(), NetworkFault> {
    let Some(link) = netlink.link_by_name(&devices.nic)? else {
        // The NIC is gone with the pod.
        return Ok(());
    };
    let change = LinkChange {
        mac: Some(nic.mac),
        up: (!saved.down).then_some(true),
        ..LinkChange::default()
    };
    netlink.change(link.index, &nic.name, change)?;
    // Added while the NIC is up: IPv6 makes no route for a temporary address otherwise.
    let added = saved_routes::add_addresses(&nic.name, &saved.addresses);
    let routed = saved_routes::restore_routes(link.index, &nic.name, &saved.routes, &saved.addresses);
    let settled = saved_routes::restore_address_flags(&nic.name, &saved.addresses);
    let known = nic
        .neighbours
        .iter()
        .try_for_each(|neighbour| netlink.add_neighbour(link.index, &nic.name, neighbour));
    added.and(routed).and(settled).and(known)
}
