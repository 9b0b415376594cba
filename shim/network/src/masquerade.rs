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

const FORWARD: &str = "ipv4/ip_forward";
const FORWARD6: &str = "ipv6/conf/all/forwarding";

/// Sysctls that the binding sets for the whole namespace, with their old values.
pub(super) fn sysctls_to_save(nic: &PodNic) -> Result<Vec<(String, String)>, NetworkFault> {
    sysctl::not_on(&required_sysctls(nic))
}

fn required_sysctls(nic: &PodNic) -> Vec<&'static str> {
    let of = |has: bool, name| has.then_some(name);
    let both = [of(nic.ipv4().is_some(), FORWARD), of(nic.has_ipv6(), FORWARD6)];
    both.into_iter().flatten().collect()
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
    if nic.ipv4().is_some() {
        netlink.add_address(index, &devices.bridge, IpNet::V4(network.gateway()))?;
        // Lets packets to 127.0.0.1 in the pod reach the guest, which on all devices would open it to other hosts.
        sysctl::set(&format!("ipv4/conf/{}/route_localnet", devices.bridge), "1")?;
    }
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
    let mut all = Vec::new();
    if nic.ipv4().is_some() {
        all.push(of(network.gateway().addr().into(), network.guest().addr().into()));
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_pods_address_families_are_translated_and_forwarded() {
        let devices = DeviceNames::for_nic("eth0").unwrap();
        for (addresses, families, sysctls) in [
            (&["10.244.1.5/24"][..], &["ip"][..], &[FORWARD][..]),
            (&["fd00::5/64"], &["ip6"], &[FORWARD6]),
            (
                &["10.244.1.5/24", "fd00::5/64"],
                &["ip", "ip6"],
                &[FORWARD, FORWARD6],
            ),
        ] {
            let nic = PodNic {
                name: "eth0".to_owned(),
                index: 2,
                mac: MacAddr([2, 0, 0, 0, 0, 1]),
                mtu: 1450,
                addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
                routes: Vec::new(),
                neighbours: Vec::new(),
            };
            let nat = nat_configs(&nic, &Masquerade::default(), &devices);
            let found: Vec<_> = nat.iter().map(NatConfig::family).collect();
            assert_eq!((&found[..], &required_sysctls(&nic)[..]), (families, sysctls));
        }
    }
}
