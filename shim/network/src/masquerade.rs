//! The masquerade binding: the guest is on its own network, and the pod is its gateway.
//!
//! ```text
//! host ── eth0 ── nftables ── k6t-eth0 (10.0.2.1) ── tap0 ── guest (10.0.2.2)
//! ```

use ipnet::IpNet;

use super::device_names::DeviceNames;
use super::error::NetworkFault;
use super::interface::{Interface, Masquerade};
use super::mac::MacAddr;
use super::netlink::Netlink;
use super::nft::{self, NatConfig};
use super::nic::PodNic;
use super::{bridge, ethtool, sysctl, tap};

const SYSCTLS: [&str; 2] = ["ipv4/ip_forward", "ipv6/conf/all/forwarding"];

/// Sysctls that the binding sets for the whole namespace, with their old values.
pub(super) fn sysctls_to_save(nic: &PodNic) -> Result<Vec<(String, String)>, NetworkFault> {
    sysctl::not_on(required_sysctls(nic))
}

fn required_sysctls(nic: &PodNic) -> &'static [&'static str] {
    match nic.has_ipv6() {
        true => &SYSCTLS,
        false => &SYSCTLS[..1],
    }
}

/// Builds the binding beside the pod's NIC, which stays unchanged.
pub(super) fn build(
    netlink: &Netlink,
    interface: &Interface,
    devices: &DeviceNames,
    nic: &PodNic,
    network: &Masquerade,
    foreign_tables: &[String],
) -> Result<(), NetworkFault> {
    netlink.add_bridge(&devices.bridge, MacAddr::GATEWAY)?;
    // No other host can have the bridge's addresses, and the guest may use them at once.
    sysctl::set(&format!("ipv6/conf/{}/accept_dad", devices.bridge), "0")?;
    // A guest that advertises itself as a router would become the pod's.
    sysctl::set(&format!("ipv6/conf/{}/accept_ra", devices.bridge), "0")?;
    let index = netlink.require_link(&devices.bridge)?.index;
    tap::create(&devices.tap, interface.queues, interface.owner)?;
    sysctl::set(&format!("ipv6/conf/{}/disable_ipv6", devices.tap), "1")?;
    let guest = netlink.require_link(&devices.tap)?.index;
    bridge::enslave(netlink, index, guest, &devices.tap, nic.mtu)?;
    netlink.set_learning(guest, &devices.tap, false)?;
    netlink.add_address(index, &devices.bridge, IpNet::V4(network.gateway()))?;
    // Lets packets to 127.0.0.1 in the pod reach the guest, which on all devices would open it to other hosts.
    sysctl::set(&format!("ipv4/conf/{}/route_localnet", devices.bridge), "1")?;
    netlink.set_up(index, &devices.bridge, true)?;
    if nic.has_ipv6() {
        netlink.add_address(index, &devices.bridge, IpNet::V6(network.gateway6()))?;
    }
    ethtool::disable_tx_checksum(&devices.bridge)?;
    for nat in nat_configs(nic, network, devices) {
        nft::add(&nat, is_foreign_table(&nat, foreign_tables))?;
    }
    required_sysctls(nic)
        .iter()
        .try_for_each(|name| sysctl::set(name, "1"))
}

/// NAT tables of the binding: one for each address family of the pod.
pub(super) fn nat_configs(nic: &PodNic, network: &Masquerade, devices: &DeviceNames) -> Vec<NatConfig> {
    let of = |gateway, guest| NatConfig {
        gateway,
        guest,
        nic: devices.nic.clone(),
        bridge: devices.bridge.clone(),
        ports: network.ports.clone(),
    };
    let mut all = vec![of(network.gateway().addr().into(), network.guest().addr().into())];
    if nic.has_ipv6() {
        all.push(of(
            network.gateway6().addr().into(),
            network.guest6().addr().into(),
        ));
    }
    all
}

/// Removes the parts that exist.
pub(super) fn tear_down(
    netlink: &Netlink,
    devices: &DeviceNames,
    nic: &PodNic,
    network: &Masquerade,
    foreign_tables: &[String],
) -> Result<(), NetworkFault> {
    for nat in nat_configs(nic, network, devices) {
        nft::remove(&nat, is_foreign_table(&nat, foreign_tables))?;
    }
    netlink.delete(&devices.tap)?;
    netlink.delete(&devices.bridge)
}

/// True if the table existed before the preparation.
fn is_foreign_table(nat: &NatConfig, foreign_tables: &[String]) -> bool {
    foreign_tables.iter().any(|family| family == nat.family())
}
