//! NICs that no guest can use are refused before anything is changed.

use husk_network::{Binding, Interface, Masquerade, tear_down};

use husk_shim_testing::pod::{Pod, interface, ip};

fn on(nic: &str, binding: Binding) -> Interface {
    Interface {
        nic: nic.to_owned(),
        ..interface(binding)
    }
}

fn masquerade() -> Binding {
    Binding::Masquerade(Masquerade::default())
}

/// Asserts that the NIC is refused with `why` and that nothing has changed.
fn refused(pod: &Pod, nic: &str, binding: Binding, why: &str) {
    let before = pod.state();
    let error = pod.prepare(&[on(nic, binding)]).unwrap_err().to_string();
    assert_eq!(error, format!("interface \"default\": {nic} {why}"));
    assert_eq!(pod.state(), before);
    assert_eq!(std::fs::read_dir(pod.dir.path()).unwrap().count(), 0);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn loopback_is_refused() {
    let pod = Pod::with_address();
    for binding in [Binding::Bridge, masquerade()] {
        refused(&pod, "lo", binding, "is the loopback device: name another one");
    }
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn devices_without_ethernet_are_refused() {
    let pod = Pod::bare();
    ip(&pod.netns, "tuntap add name net1 mode tun");
    for binding in [Binding::Bridge, masquerade()] {
        let why = "is not an Ethernet device (tun): add one, such as a veth";
        refused(&pod, "net1", binding, why);
    }
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_port_is_not_taken_from_its_bridge() {
    let pod = Pod::bare();
    ip(&pod.netns, "link add br9 type bridge");
    ip(&pod.netns, "link set eth0 master br9");
    ip(&pod.netns, "addr add 10.244.1.5/24 dev br9");
    for binding in [Binding::Bridge, masquerade()] {
        let why = "is already a port of br9: take it from there first (`ip link set eth0 nomaster`)";
        refused(&pod, "eth0", binding, why);
    }
    let why = "is a bridge, which cannot be a port of another: use masquerade, or give the pod a veth";
    refused(&pod, "br9", Binding::Bridge, why);
    drop(pod.prepare(&[on("br9", masquerade())]).unwrap());
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn an_mtu_that_no_tap_has_is_named() {
    let pod = Pod::with_address();
    ip(&pod.node, "link set veth0 mtu 65535");
    ip(&pod.netns, "link set eth0 mtu 65535");
    for binding in [Binding::Bridge, masquerade()] {
        let why = "has an MTU of 65535, and a tap takes at most 65521: `ip link set eth0 mtu 65521`";
        refused(&pod, "eth0", binding, why);
    }
    ip(&pod.netns, "link set eth0 mtu 65521");
    assert_eq!(pod.ready(&interface(Binding::Bridge)).mtu, 65521);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_network_behind_the_pod_is_not_the_pods() {
    let pod = Pod::with_both_families();
    ip(&pod.netns, "route add 192.168.7.1 dev eth0");
    ip(&pod.netns, "route add 192.168.0.0/16 via 192.168.7.1");
    let near = "where eth0 is or leads: choose another one";
    for (cidr, other) in [
        ("10.244.1.0/24", "10.244.1.0/24"),
        ("10.244.0.0/16", "10.244.1.0/24"),
        ("10.244.1.64/26", "10.244.1.0/24"),
        ("192.168.7.0/24", "192.168.7.1/32"),
    ] {
        let network = Masquerade {
            cidr: cidr.parse().unwrap(),
            ..Masquerade::default()
        };
        let before = pod.state();
        let error = pod
            .prepare(&[interface(Binding::Masquerade(network))])
            .unwrap_err();
        let expected = format!("interface \"default\": vmNetworkCIDR: {cidr} overlaps {other}, {near}");
        assert_eq!(error.to_string(), expected);
        assert_eq!(pod.state(), before);
    }
    let network = Masquerade {
        cidr6: "fd00:1::/120".parse().unwrap(),
        ..Masquerade::default()
    };
    let error = pod
        .prepare(&[interface(Binding::Masquerade(network))])
        .unwrap_err();
    let expected = format!("vmIPv6NetworkCIDR: fd00:1::/120 overlaps fd00:1::/64, {near}");
    assert!(error.to_string().ends_with(&expected), "{error}");

    // A routed network does not overlap, and the default one may be part of the pod's.
    ip(&pod.netns, "addr add 10.0.7.5/16 dev eth0");
    let network = Masquerade {
        cidr: "192.168.8.0/24".parse().unwrap(),
        ..Masquerade::default()
    };
    drop(pod.ready(&interface(Binding::Masquerade(network))));
    tear_down(&pod.netns, pod.dir.path()).unwrap();
    drop(pod.ready(&interface(masquerade())));
}

/// Some network plugins give a pod one address, with a route to its gateway. Both can be in the default network.
#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_pod_with_an_address_in_the_default_network_keeps_it() {
    let pod = Pod::with_address();
    let address = |address: &str| {
        ip(&pod.netns, "addr flush dev eth0");
        ip(&pod.netns, &format!("addr add {address}/32 dev eth0"));
        ip(&pod.netns, "route add 10.0.2.45 dev eth0");
        ip(&pod.netns, "route add default via 10.0.2.45");
    };
    address("10.0.2.17");
    drop(pod.ready(&interface(masquerade())));
    tear_down(&pod.netns, pod.dir.path()).unwrap();
    ip(&pod.netns, "addr flush dev eth0");
    ip(&pod.netns, "addr add 10.0.2.17/16 dev eth0");
    let error = pod.prepare(&[interface(masquerade())]).unwrap_err().to_string();
    assert!(error.contains("10.0.2.0/24 overlaps 10.0.2.17/32"), "{error}");
    for of_the_guests_network in ["10.0.2.1", "10.0.2.2"] {
        address(of_the_guests_network);
        let error = pod.prepare(&[interface(masquerade())]).unwrap_err().to_string();
        assert!(error.contains("10.0.2.0/24 overlaps"), "{error}");
    }
}
