//! Addresses of the host's guests.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use sha2::{Digest, Sha256};

use crate::mac::MacAddr;

/// Candidate networks in order of preference: private, with 4,093 guest addresses each, and not the defaults of other
/// programs.
fn candidates() -> impl Iterator<Item = Ipv4Net> {
    let usual = (77..96).map(|second| Ipv4Addr::new(10, second, 0, 0));
    let others = [Ipv4Addr::new(172, 29, 0, 0), Ipv4Addr::new(192, 168, 224, 0)];
    usual
        .chain(others)
        .map(|address| Ipv4Net::new_assert(address, 20))
}

/// First candidate that overlaps no network in `taken`.
pub(super) fn choose(taken: &[Ipv4Net]) -> Option<Ipv4Net> {
    let overlap = |one: &Ipv4Net, other: &Ipv4Net| one.contains(other) || other.contains(one);
    candidates().find(|net| !taken.iter().any(|other| overlap(net, other)))
}

/// Guest addresses, the VM's preferred one first. It depends on the VM's name, so that a restarted VM gets its address
/// again unless another VM has it.
pub(super) fn guest_addresses(gateway: Ipv4Net, vm: &str) -> impl Iterator<Item = Ipv4Addr> {
    let digest = Sha256::digest(vm.as_bytes());
    let number = digest
        .iter()
        .take(4)
        .fold(0, |number, byte| number << 8 | u32::from(*byte));
    let (first, last) = (u32::from(gateway.network()), u32::from(gateway.broadcast()));
    let count = last.saturating_sub(first).saturating_sub(1);
    let nth = move |n: u32| Ipv4Addr::from(first + 1 + (number % count.max(1) + n) % count.max(1));
    (0..count)
        .map(nth)
        .filter(move |address| *address != gateway.addr())
}

/// MAC address derived from an IPv4 address, as in other CNI plugins.
pub(super) fn mac(address: Ipv4Addr) -> MacAddr {
    let [a, b, c, d] = address.octets();
    MacAddr([0x0a, 0x58, a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<Ipv4Net> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn a_network_with_a_route_is_skipped() {
        let chosen = |taken: &[&str]| choose(&nets(taken)).map(|net| net.to_string());
        assert_eq!(chosen(&["192.168.1.0/24"]).unwrap(), "10.77.0.0/20");
        assert_eq!(chosen(&["10.77.3.7/32"]).unwrap(), "10.78.0.0/20");
        assert_eq!(chosen(&["10.0.0.0/8"]).unwrap(), "172.29.0.0/20");
        assert_eq!(chosen(&["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"]), None);
    }

    #[test]
    fn address_is_stable_per_vm_and_covers_the_subnet() {
        let gateway = Ipv4Net::new_assert([10, 77, 0, 1].into(), 20);
        let first = |vm| guest_addresses(gateway, vm).next().unwrap();
        assert_eq!(first("default/a"), first("default/a"));
        assert_ne!(first("default/a"), first("default/b"));
        let mut all: Vec<Ipv4Addr> = guest_addresses(gateway, "default/a").collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 4093);
        assert_eq!(all.first(), Some(&Ipv4Addr::new(10, 77, 0, 2)));
        assert_eq!(all.last(), Some(&Ipv4Addr::new(10, 77, 15, 254)));
        let small = Ipv4Net::new_assert([10, 0, 0, 2].into(), 30);
        assert_eq!(
            guest_addresses(small, "x").collect::<Vec<_>>(),
            [Ipv4Addr::new(10, 0, 0, 1)]
        );
        for full in [31, 32] {
            assert_eq!(
                guest_addresses(Ipv4Net::new_assert([10, 0, 0, 2].into(), full), "x").count(),
                0
            );
        }
    }
}
