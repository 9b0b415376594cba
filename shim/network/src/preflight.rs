//! Checks, before anything is changed, that a guest can use a pod's NIC.

use ipnet::IpNet;

use super::error::NetworkFault;
use super::interface::{Binding, Interface, Masquerade};
use super::netlink::{Link, Netlink};
use super::nic::PodNic;

/// Largest MTU of a tap: 65535 bytes less the Ethernet header.
const TAP_MTU: u32 = 65521;

/// Refuses a NIC that the binding cannot use.
pub(super) fn check(netlink: &Netlink, nic: &PodNic, interface: &Interface) -> Result<(), NetworkFault> {
    if nic.mtu > TAP_MTU {
        let reason = format!(
            "has an MTU of {}, and a tap takes at most {TAP_MTU}: `ip link set {} mtu {TAP_MTU}`",
            nic.mtu, nic.name
        );
        return Err(NetworkFault::unsuitable(&nic.name, reason));
    }
    let Some(link) = netlink.link_by_index(nic.index)? else {
        return Err(NetworkFault::NicNotFound(nic.name.clone()));
    };
    let takes_over = interface.binding == Binding::Bridge;
    if takes_over && link.kind == "bridge" {
        let reason = "is a bridge, which cannot be a port of another: use masquerade, or give the pod a veth";
        return Err(NetworkFault::unsuitable(&nic.name, reason));
    }
    if let Binding::Masquerade(network) = &interface.binding {
        check_overlap(nic, network)?;
        for note in connectivity_warnings(&link, nic) {
            tracing::warn!(interface = interface.name, device = nic.name, "{note}");
        }
    }
    // A port with its own addresses is enslaved to a VRF, for example, where masquerade leaves it.
    if let Some(index) = link.bridge.filter(|_| takes_over || nic.addresses.is_empty()) {
        let other = netlink.link_by_index(index)?;
        let other = other.map_or_else(|| format!("device {index}"), |link| link.name);
        let reason = format!(
            "is already a port of {other}: take it from there first (`ip link set {} nomaster`)",
            nic.name
        );
        return Err(NetworkFault::unsuitable(&nic.name, reason));
    }
    Ok(())
}

/// Reasons why a guest behind this NIC has no connectivity at the moment.
fn connectivity_warnings(link: &Link, nic: &PodNic) -> Vec<&'static str> {
    let mut notes = Vec::new();
    if !link.up {
        notes.push("the pod's device is down, so the guest has no connectivity until it is set up");
    }
    if nic.addresses.is_empty() {
        notes.push("the pod's device has no address, so the guest has no connectivity");
    }
    notes
}

/// Refuses a guest network that overlaps the pod's networks: the bridge would have the addresses of the pod's
/// neighbours.
fn check_overlap(nic: &PodNic, network: &Masquerade) -> Result<(), NetworkFault> {
    let fields = [
        (
            "vmNetworkCIDR",
            IpNet::V4(network.cidr.trunc()),
            [network.gateway(), network.guest()].map(|net| net.addr().into()),
        ),
        (
            "vmIPv6NetworkCIDR",
            IpNet::V6(network.cidr6.trunc()),
            [network.gateway6(), network.guest6()].map(|net| net.addr().into()),
        ),
    ];
    for (field, cidr, used) in fields {
        let networks = connected_networks(nic);
        for near in networks.iter().copied() {
            let within = near.contains(&cidr) && near != cidr;
            // A host in no wider network of the pod has a route of its own, which precedes the guest's network.
            let is_host = near.prefix_len() == near.max_prefix_len();
            let has_own_route = !networks
                .iter()
                .any(|other| *other != near && other.contains(&near));
            let apart = is_host && has_own_route && !used.contains(&near.addr());
            if is_default(cidr) && (within || cidr.contains(&near) && apart) {
                // KubeVirt allows this for the default networks: the pod only loses the neighbours in that range.
                tracing::warn!(
                    device = nic.name,
                    pod = %near,
                    guest = %cidr,
                    "the guest's network overlaps the pod's and hides other hosts: {field} chooses another one"
                );
            } else if within || cidr.contains(&near) {
                let reason = format!(
                    "{cidr} overlaps {near}, where {} is or leads: choose another one",
                    nic.name
                );
                return Err(NetworkFault::InvalidField { field, reason });
            }
        }
    }
    Ok(())
}

fn is_default(cidr: IpNet) -> bool {
    let default = Masquerade::default();
    cidr == IpNet::V4(default.cidr) || cidr == IpNet::V6(default.cidr6)
}

/// Networks of the NIC, its addresses and its gateways.
fn connected_networks(nic: &PodNic) -> Vec<IpNet> {
    let addresses = nic.addresses.iter();
    let own = addresses.flat_map(|net| [net.trunc(), IpNet::from(net.addr())]);
    let reached = nic.routes.iter().map(|route| match route.gateway {
        Some(gateway) => IpNet::from(gateway),
        None => route.destination.trunc(),
    });
    let mut near: Vec<IpNet> = own.chain(reached).filter(|net| net.prefix_len() > 0).collect();
    near.sort();
    near.dedup();
    near
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;
    use crate::interface::TapOwner;
    use crate::mac::MacAddr;
    use crate::netns::Netns;

    /// Collects log messages.
    #[derive(Debug, Clone, Default)]
    struct Log(Arc<Mutex<String>>);

    impl Visit for Log {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            *self.0.lock().unwrap() += &format!("{field}={value:?} ");
        }
    }

    impl Subscriber for Log {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            event.record(&mut self.clone());
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    #[ignore = "needs root"]
    fn missing_connectivity_is_logged() {
        let interface = Interface {
            name: "default".to_owned(),
            nic: "eth0".to_owned(),
            index: 0,
            binding: Binding::Masquerade(Masquerade::default()),
            mac: None,
            queues: 1,
            owner: TapOwner { uid: 0, gid: 0 },
        };
        let logged = |netlink: &Netlink| {
            let log = Log::default();
            let nic = PodNic::discover(netlink, "eth0").unwrap();
            let work = || check(netlink, &nic, &interface).unwrap();
            tracing::subscriber::with_default(log.clone(), work);
            log.0.lock().unwrap().clone()
        };
        let work = || {
            let netlink = Netlink::open().unwrap();
            // Down and without an address.
            netlink.add_bridge("eth0", MacAddr::random()).unwrap();
            let text = logged(&netlink);
            assert!(text.contains("interface=\"default\" device=\"eth0\""), "{text}");
            assert!(
                text.contains("is down") && text.contains("has no address"),
                "{text}"
            );
            let index = netlink.require_link("eth0").unwrap().index;
            netlink.set_up(index, "eth0", true).unwrap();
            netlink
                .add_address(index, "eth0", "10.1.1.1/24".parse().unwrap())
                .unwrap();
            assert_eq!(logged(&netlink), "");
        };
        Netns::create().unwrap().run(work).unwrap();
    }
}
