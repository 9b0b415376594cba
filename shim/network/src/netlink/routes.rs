//! Routes of the main table.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteNextHopFlags, RouteProtocol, RouteScope,
    RouteType, RouteVia,
};
use rtnetlink::RouteMessageBuilder;

use super::connection::Netlink;
use crate::error::NetworkFault;
use crate::route::Route;

impl Netlink {
    /// Unicast routes through a link.
    pub(crate) fn routes(&self, index: u32) -> Result<Vec<Route>, NetworkFault> {
        let mut found = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut ask = RouteMessage::default();
            ask.header.address_family = family;
            let messages = self.collect("reading routes", self.handle.route().get(ask).execute())?;
            found.extend(messages.iter().filter_map(|message| route_of(message, index)));
        }
        Ok(found)
    }

    /// Destinations of all IPv4 routes in all tables, without default routes.
    pub(crate) fn routed(&self) -> Result<Vec<Ipv4Net>, NetworkFault> {
        let messages = self.collect("reading routes", self.handle.route().get(all_ipv4()).execute())?;
        let destination = |message: &RouteMessage| {
            let address = message.attributes.iter().find_map(|attribute| match attribute {
                RouteAttribute::Destination(RouteAddress::Inet(address)) => Some(*address),
                _ => None,
            });
            Ipv4Net::new(address?, message.header.destination_prefix_length).ok()
        };
        Ok(messages
            .iter()
            .filter_map(destination)
            .filter(|net| net.prefix_len() > 0)
            .collect())
    }

    /// Index of the link of the preferred default route.
    pub(crate) fn uplink(&self) -> Result<Option<u32>, NetworkFault> {
        let messages = self.collect("reading routes", self.handle.route().get(all_ipv4()).execute())?;
        let default = |message: &&RouteMessage| {
            let header = &message.header;
            header.destination_prefix_length == 0
                && header.table == RouteHeader::RT_TABLE_MAIN
                && header.kind == RouteType::Unicast
        };
        let link = |message: &RouteMessage| {
            let (mut metric, mut link) = (0, None);
            for attribute in &message.attributes {
                match attribute {
                    RouteAttribute::Priority(priority) => metric = *priority,
                    RouteAttribute::Oif(oif) => link = Some(*oif),
                    RouteAttribute::MultiPath(hops) => link = hops.first().map(|hop| hop.interface_index),
                    _ => {}
                }
            }
            link.map(|link| (metric, link))
        };
        let best = messages.iter().filter(default).filter_map(link).min();
        Ok(best.map(|(_, link)| link))
    }

    /// Adds a route through a link, unless it exists.
    pub(crate) fn add_route(&self, index: u32, name: &str, route: &Route) -> Result<(), NetworkFault> {
        let request = self.handle.route().add(message_of(index, route));
        match self.block_on(format!("adding route {route} to {name}"), request.execute()) {
            Err(fault) if fault.errno() == Some(libc::EEXIST) => Ok(()),
            done => done,
        }
    }
}

fn all_ipv4() -> RouteMessage {
    let mut ask = RouteMessage::default();
    ask.header.address_family = AddressFamily::Inet;
    ask
}

fn route_of(message: &RouteMessage, index: u32) -> Option<Route> {
    let header = &message.header;
    if header.table != RouteHeader::RT_TABLE_MAIN || header.kind != RouteType::Unicast {
        return None;
    }
    let mut route = Route {
        destination: match header.address_family {
            AddressFamily::Inet => Ipv4Net::new(Ipv4Addr::UNSPECIFIED, header.destination_prefix_length)
                .ok()?
                .into(),
            AddressFamily::Inet6 => Ipv6Net::new(Ipv6Addr::UNSPECIFIED, header.destination_prefix_length)
                .ok()?
                .into(),
            _ => return None,
        },
        gateway: None,
        source: None,
        metric: None,
        onlink: header.flags.bits() & u32::from(RouteNextHopFlags::Onlink.bits()) != 0,
        protocol: header.protocol.into(),
    };
    let mut through = false;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => {
                route.destination = IpNet::new(ip(address)?, header.destination_prefix_length).ok()?;
            }
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => route.gateway = gateway(attribute),
            RouteAttribute::PrefSource(address) => route.source = ip(address),
            RouteAttribute::Priority(metric) => route.metric = Some(*metric),
            RouteAttribute::Oif(oif) => through = *oif == index,
            RouteAttribute::MultiPath(hops) => {
                // A guest has one NIC for this link: use the first next hop through it.
                let hop = hops.iter().find(|hop| hop.interface_index == index)?;
                route.gateway = hop.attributes.iter().find_map(gateway);
                route.onlink = hop.flags.contains(RouteNextHopFlags::Onlink);
                through = true;
            }
            _ => {}
        }
    }
    let link_local =
        matches!(route.destination.addr(), IpAddr::V6(ip) if ip.is_unicast_link_local() || ip.is_multicast());
    (through && !link_local).then_some(route)
}

/// The gateway; one of another family than the route's is a `Via`.
fn gateway(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        RouteAttribute::Via(RouteVia::Inet(ip)) => Some(IpAddr::V4(*ip)),
        RouteAttribute::Via(RouteVia::Inet6(ip)) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteAddress::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

fn message_of(index: u32, route: &Route) -> RouteMessage {
    let mut message = match route.destination {
        IpNet::V4(net) => RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(net.network(), net.prefix_len())
            .output_interface(index)
            .build(),
        IpNet::V6(net) => RouteMessageBuilder::<Ipv6Addr>::new()
            .destination_prefix(net.network(), net.prefix_len())
            .output_interface(index)
            .build(),
    };
    message.header.protocol = RouteProtocol::from(route.protocol);
    let address = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => RouteAddress::Inet(ip),
        IpAddr::V6(ip) => RouteAddress::Inet6(ip),
    };
    let family_of_route = message.header.address_family;
    let same = |ip: &IpAddr| family(*ip) == family_of_route;
    match route.gateway {
        Some(gateway) if same(&gateway) => message.attributes.push(RouteAttribute::Gateway(address(gateway))),
        Some(IpAddr::V6(gateway)) => message.attributes.push(RouteAttribute::Via(gateway.into())),
        _ if family_of_route == AddressFamily::Inet => message.header.scope = RouteScope::Link,
        _ => {}
    }
    if let Some(source) = route.source.filter(same) {
        message
            .attributes
            .push(RouteAttribute::PrefSource(address(source)));
    }
    if let Some(metric) = route.metric {
        message.attributes.push(RouteAttribute::Priority(metric));
    }
    if route.onlink {
        let flags = message.header.flags.bits() | u32::from(RouteNextHopFlags::Onlink.bits());
        message.header.flags = netlink_packet_route::route::RouteFlags::from_bits_retain(flags);
    }
    message
}

fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::route::RouteNextHop;

    use super::*;
    use crate::lease::DhcpLease;
    use crate::mac::MacAddr;
    use crate::nic::PodNic;

    #[test]
    fn an_ipv6_gateway_of_an_ipv4_route_is_not_on_link() {
        let gateway: Ipv6Addr = "fe80::1".parse().unwrap();
        let via = RouteAttribute::Via(gateway.into());
        let mut hop = RouteNextHop::default();
        hop.interface_index = 2;
        hop.attributes.push(via.clone());
        for through in [
            vec![via, RouteAttribute::Oif(2)],
            vec![RouteAttribute::MultiPath(vec![hop])],
        ] {
            let mut message = all_ipv4();
            message.header.table = RouteHeader::RT_TABLE_MAIN;
            message.header.kind = RouteType::Unicast;
            message.attributes = through;
            let route = route_of(&message, 2).unwrap();
            assert_eq!(route_of(&message_of(2, &route), 2).as_ref(), Some(&route));
            assert_eq!(route.gateway, Some(gateway.into()));
            let mac = MacAddr([2, 0, 0, 0, 0, 1]);
            let nic = PodNic {
                name: "eth0".to_owned(),
                index: 2,
                mac,
                mtu: 1450,
                addresses: vec!["10.244.1.5/24".parse().unwrap()],
                routes: vec![route],
                neighbours: Vec::new(),
            };
            let lease = DhcpLease::for_bridge(&nic, mac, Ipv4Addr::new(169, 254, 75, 10)).unwrap();
            assert_eq!(lease.routes, []);
        }
    }
}
