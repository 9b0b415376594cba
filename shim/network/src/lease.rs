//! DHCP leases.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::interface::Masquerade;
use super::mac::MacAddr;
use super::nic::PodNic;

/// The one lease of a DHCPv4 server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DhcpLease {
    /// MAC address of the one client that gets the lease. If `None`, each client does: a masqueraded guest may have its
    /// address at a bridge of its own.
    pub client: Option<MacAddr>,
    /// The guest's address and prefix length.
    pub address: Ipv4Net,
    /// The server's address.
    pub server: Ipv4Addr,
    /// Gateway of the default route, if it has one.
    pub router: Option<Ipv4Addr>,
    /// Classless static routes (option 121), the default route last. A gateway of 0.0.0.0 means on-link. Empty if
    /// `router` is enough.
    pub routes: Vec<(Ipv4Net, Ipv4Addr)>,
    /// In bytes.
    pub mtu: u32,
}

/// The one lease of a DHCPv6 server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dhcpv6Lease {
    /// The guest's address and prefix length.
    pub address: Ipv6Net,
    /// The server's MAC address.
    pub server: MacAddr,
    /// In bytes.
    pub mtu: u32,
}

impl DhcpLease {
    /// Lease of a bridged guest: the pod's address and routes. `None` if the pod has no IPv4 address.
    pub(super) fn for_bridge(nic: &PodNic, mac: MacAddr, server: Ipv4Addr) -> Option<DhcpLease> {
        let address = nic.ipv4()?;
        let mut routes: Vec<(Ipv4Net, Ipv4Addr)> = Vec::new();
        for route in &nic.routes {
            let IpNet::V4(destination) = route.destination else {
                continue;
            };
            let gateway = match route.gateway {
                Some(IpAddr::V4(gateway)) => gateway,
                // Option 121 cannot express an IPv6 gateway.
                Some(IpAddr::V6(_)) => continue,
                None => Ipv4Addr::UNSPECIFIED,
            };
            let implied = gateway.is_unspecified() && destination.trunc() == address.trunc();
            let route = (destination.trunc(), gateway);
            if !implied && !routes.contains(&route) {
                routes.push(route);
            }
        }
        reach_gateways(address, &mut routes);
        routes.sort_by_key(|(destination, gateway)| {
            (
                std::cmp::Reverse(destination.prefix_len()),
                !gateway.is_unspecified(),
            )
        });
        let router = routes
            .iter()
            .find(|(destination, gateway)| destination.prefix_len() == 0 && !gateway.is_unspecified())
            .map(|(_, gateway)| *gateway);
        Some(DhcpLease {
            client: Some(mac),
            address,
            server,
            router,
            routes,
            mtu: nic.mtu,
        })
    }

    /// Lease of a masqueraded guest; `None` if the pod has no IPv4 address.
    pub(super) fn for_masquerade(network: &Masquerade, nic: &PodNic) -> Option<DhcpLease> {
        let gateway = network.gateway().addr();
        nic.ipv4().map(|_| DhcpLease {
            client: None,
            address: network.guest(),
            server: gateway,
            router: Some(gateway),
            routes: Vec::new(),
            mtu: nic.mtu,
        })
    }
}

impl Dhcpv6Lease {
    /// Lease of a masqueraded guest; `None` if the pod has no IPv6.
    pub(super) fn for_masquerade(network: &Masquerade, nic: &PodNic) -> Option<Dhcpv6Lease> {
        nic.has_ipv6().then(|| Dhcpv6Lease {
            address: network.guest6(),
            server: MacAddr::GATEWAY,
            mtu: nic.mtu,
        })
    }

    /// The gateway, which sends router advertisements.
    pub fn gateway(&self) -> Ipv6Addr {
        let net = self.address.trunc();
        Ipv6Addr::from(u128::from(net.addr()).wrapping_add(1))
    }
}

/// Adds on-link routes to gateways. A gateway outside of the guest's networks, such as 169.254.1.1 behind a /32
/// address, is reachable in the pod because its route is `onlink`; option 121 expresses this by a host route to the
/// gateway.
fn reach_gateways(address: Ipv4Net, routes: &mut Vec<(Ipv4Net, Ipv4Addr)>) {
    let on_link: Vec<Ipv4Net> = routes
        .iter()
        .filter(|(destination, gateway)| gateway.is_unspecified() && destination.prefix_len() > 0)
        .map(|(destination, _)| *destination)
        .chain([address])
        .collect();
    let mut more: Vec<(Ipv4Net, Ipv4Addr)> = Vec::new();
    for (_, gateway) in routes.iter().filter(|(_, gateway)| !gateway.is_unspecified()) {
        let route = (Ipv4Net::from(*gateway), Ipv4Addr::UNSPECIFIED);
        if !on_link.iter().any(|net| net.contains(gateway)) && !more.contains(&route) {
            more.push(route);
        }
    }
    routes.extend(more);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::route::Route;

    fn nic(address: &str, routes: &[(&str, Option<&str>)]) -> PodNic {
        let route = |(destination, gateway): &(&str, Option<&str>)| Route {
            destination: destination.parse().unwrap(),
            gateway: gateway.map(|gateway| gateway.parse().unwrap()),
            source: None,
            metric: None,
            onlink: false,
            protocol: 0,
        };
        PodNic {
            name: "eth0".to_owned(),
            index: 2,
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            mtu: 1450,
            addresses: vec![address.parse().unwrap()],
            routes: routes.iter().map(route).collect(),
            neighbours: Vec::new(),
        }
    }

    fn lease(nic: &PodNic) -> DhcpLease {
        DhcpLease::for_bridge(nic, nic.mac, Ipv4Addr::new(169, 254, 75, 10)).unwrap()
    }

    fn text(lease: &DhcpLease) -> Vec<String> {
        let one = |(net, by): &(Ipv4Net, Ipv4Addr)| format!("{net} {by}");
        lease.routes.iter().map(one).collect()
    }

    #[test]
    fn the_network_of_the_address_needs_no_route() {
        let pod = nic(
            "10.244.1.5/24",
            &[
                ("0.0.0.0/0", Some("10.244.1.1")),
                ("10.244.1.0/24", None),
                ("10.244.0.0/16", Some("10.244.1.1")),
            ],
        );
        let lease = lease(&pod);
        assert_eq!(text(&lease), ["10.244.0.0/16 10.244.1.1", "0.0.0.0/0 10.244.1.1"]);
        assert_eq!(lease.router, Some(Ipv4Addr::new(10, 244, 1, 1)));
    }

    #[test]
    fn a_link_local_gateway_is_on_the_link() {
        let said = [("0.0.0.0/0", Some("169.254.1.1")), ("169.254.1.1/32", None)];
        for routes in [&said[..], &said[..1]] {
            let lease = lease(&nic("10.244.1.5/32", routes));
            assert_eq!(text(&lease), ["169.254.1.1/32 0.0.0.0", "0.0.0.0/0 169.254.1.1"]);
            assert_eq!(lease.router, Some(Ipv4Addr::new(169, 254, 1, 1)));
        }
    }

    #[test]
    fn without_an_address_there_is_no_lease() {
        let pod = nic("fd00::5/64", &[]);
        assert_eq!(
            DhcpLease::for_bridge(&pod, pod.mac, Ipv4Addr::new(169, 254, 75, 10)),
            None
        );
        assert_eq!(DhcpLease::for_masquerade(&Masquerade::default(), &pod), None);
        assert!(Dhcpv6Lease::for_masquerade(&Masquerade::default(), &pod).is_some());
    }
}
