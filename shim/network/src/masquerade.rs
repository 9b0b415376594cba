//! The masquerade binding: the guest is on a network of its own, whose gateway is the pod.
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

const SYSCTLS: [&str; 3] = [
    "ipv4/ip_forward",
    // Lets what is sent to 127.0.0.1 in the pod reach the guest.
    "ipv4/conf/all/route_localnet",
    "ipv6/conf/all/forwarding",
];

/// Switches that are changed for the namespace as a whole, and how they were.
pub(super) fn sysctls_to_save(nic: &PodNic) -> Result<Vec<(String, String)>, NetworkFault> {
    sysctl::not_on(required_sysctls(nic))
}

fn required_sysctls(nic: &PodNic) -> &'static [&'static str] {
    match nic.has_ipv6() {
        true => &SYSCTLS,
        false => &SYSCTLS[..2],
    }
}

/// Builds it beside the pod's device, which stays as it is.
pub(super) fn build(
    netlink: &Netlink,
    interface: &Interface,
    devices: &DeviceNames,
    nic: &PodNic,
    network: &Masquerade,
    foreign_tables: &[String],
) -> Result<(), NetworkFault> {
    netlink.add_bridge(&devices.bridge, MacAddr::GATEWAY)?;
    // Nobody else is there to have the bridge's addresses, and the guest may ask for them at once.
    sysctl::set(&format!("ipv6/conf/{}/accept_dad", devices.bridge), "0")?;
    let index = netlink.require_link(&devices.bridge)?.index;
    tap::create(&devices.tap, interface.queues, interface.owner)?;
    sysctl::set(&format!("ipv6/conf/{}/disable_ipv6", devices.tap), "1")?;
    let guest = netlink.require_link(&devices.tap)?.index;
    bridge::enslave(netlink, index, guest, &devices.tap, nic.mtu)?;
    netlink.add_address(index, &devices.bridge, IpNet::V4(network.gateway()))?;
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

/// The tables it needs: one for each family the pod speaks.
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

/// Takes back whatever of it was built.
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

/// Whether its table was there before.
fn is_foreign_table(nat: &NatConfig, foreign_tables: &[String]) -> bool {
    foreign_tables.iter().any(|family| family == nat.family())
}
