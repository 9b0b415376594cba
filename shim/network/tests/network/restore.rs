//! Everything that the bridge binding removed is restored.

use husk_network::{Binding, MacAddr, tear_down};

use husk_shim_testing::pod::{Pod, interface, ip};

/// State that must be restored.
fn all(pod: &Pod) -> Vec<String> {
    let mut text = String::new();
    for words in [
        "-o link show eth0",
        "-o -4 addr show",
        "-o -6 addr show scope global",
        "-4 route show table all",
        "-6 route show table all",
        "rule show",
    ] {
        text += &pod.shows(words);
    }
    // Carrier and link-local state change by themselves, and link indexes are not reused.
    let lines = text
        .lines()
        .filter(|line| !line.contains("fe80:") && !line.contains("multicast"));
    let mut lines: Vec<String> = lines
        .map(|line| {
            let line = line.replace("NO-CARRIER,", "").replace(",LOWER_UP", "");
            line.replace("state LOWERLAYERDOWN", "state UP")
                .replace(" linkdown", "")
        })
        .collect();
    lines.sort();
    lines
}

/// Prepares and tears down the NIC.
fn comes_back(pod: &Pod) {
    let before = all(pod);
    drop(pod.ready(&interface(Binding::Bridge)));
    assert_ne!(all(pod), before);
    tear_down(&pod.netns, pod.dir.path()).unwrap();
    assert_same(&before, &all(pod));
}

fn assert_same(before: &[String], after: &[String]) {
    let lost: Vec<_> = before.iter().filter(|line| !after.contains(line)).collect();
    let new: Vec<_> = after.iter().filter(|line| !before.contains(line)).collect();
    assert!(lost.is_empty() && new.is_empty(), "lost {lost:#?}, new {new:#?}");
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn routes_of_every_table_and_kind() {
    let pod = Pod::with_both_families();
    pod.add_veth(
        "veth1",
        MacAddr([2, 0, 0, 0, 9, 1]),
        "net1",
        MacAddr([2, 0, 0, 0, 0, 1]),
    );
    ip(&pod.netns, "addr add 10.9.1.5/24 dev net1");
    ip(&pod.netns, "addr add fd00:9::5/64 dev net1 nodad");
    for words in [
        "route add 10.1.0.0/16 via 10.244.1.1 table 100",
        "rule add from 10.244.1.5 lookup 100",
        "route add default via 10.244.1.2 metric 50 mtu 1300 advmss 1200 proto static",
        "route add 10.2.0.0/16 tos 0x10 via 10.244.1.1",
        "route add 10.2.0.0/16 via 10.244.1.2",
        "route append 10.2.0.0/16 via 10.244.1.3",
        "route add 10.3.0.0/16 nexthop via 10.244.1.1 weight 3 nexthop via 10.244.1.2 weight 2",
        "route add 10.4.0.0/16 nexthop via 10.244.1.1 nexthop via 10.9.1.1",
        "route add 10.5.0.0/16 via 192.0.2.1 dev eth0 onlink quickack 1 congctl cubic",
        // Through a gateway that only another route reaches.
        "route add 198.51.100.1 dev eth0",
        "route add 10.6.0.0/16 via 198.51.100.1",
        // Through another device, with a source address of this one.
        "route add 10.7.0.0/16 dev net1 src 10.244.1.5",
        "-6 route add fd00:2::/64 via fd00:1::1 table 100 mtu 1300",
        "-6 route add fd00:3::/64 nexthop via fd00:1::1 weight 3 nexthop via fd00:1::2 weight 2",
        "-6 route add fd00:4::/64 nexthop via fd00:1::1 nexthop via fd00:9::1",
        "-6 route add fd00:5::/64 dev eth0 src fd00:1::5 metric 7 pref high",
        "route add broadcast 10.8.0.255 dev eth0 table 100",
    ] {
        ip(&pod.netns, words);
    }
    comes_back(&pod);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn addresses_with_all_that_belongs_to_them() {
    let pod = Pod::bare();
    for words in [
        "addr add 10.244.1.5/24 brd 10.244.1.77 dev eth0 label eth0:one scope link",
        "addr add 10.244.1.6/24 dev eth0 scope link",
        "addr add 10.245.1.5/24 dev eth0 noprefixroute",
        "addr add 10.246.1.5 peer 10.246.1.6/32 dev eth0 metric 300",
        "addr add 10.247.1.5/24 brd + dev eth0 preferred_lft 0",
        "addr add fd00:1::5/64 dev eth0 nodad",
        "addr add fd00:2::5/64 dev eth0 nodad noprefixroute preferred_lft 0",
    ] {
        ip(&pod.netns, words);
    }
    // An address that passed duplicate address detection does not keep the nodad flag.
    ip(&pod.netns, "addr add fd00:3::5/64 dev eth0");
    let tentative = || pod.shows("-6 addr show dev eth0").contains("tentative");
    while tentative() {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    comes_back(&pod);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_route_that_a_plugin_removed_is_not_restored() {
    let pod = Pod::with_both_families();
    // As the CNI plugin `ptp` does.
    ip(&pod.netns, "route add 10.244.1.1 dev eth0 src 10.244.1.5");
    ip(&pod.netns, "route del 10.244.1.0/24 dev eth0");
    ip(
        &pod.netns,
        "route add 10.244.1.0/24 via 10.244.1.1 src 10.244.1.5",
    );
    ip(&pod.netns, "-6 route del fd00:1::/64 dev eth0");
    comes_back(&pod);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_device_that_was_down_is_down_again() {
    let pod = Pod::bare();
    ip(&pod.netns, "link set eth0 down");
    ip(&pod.netns, "addr add 10.244.1.5/24 dev eth0");
    comes_back(&pod);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_device_without_a_carrier_gets_its_routes_too() {
    let pod = Pod::with_both_families();
    ip(&pod.netns, "route add 10.1.0.0/16 via 10.244.1.1 table 100");
    ip(&pod.netns, "-6 route add fd00:2::/64 via fd00:1::1 table 100");
    ip(&pod.node, "link set veth0 down");
    comes_back(&pod);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_route_by_an_object_keeps_its_way() {
    let pod = Pod::with_address();
    ip(&pod.netns, "nexthop add id 5 via 10.244.1.1 dev eth0");
    ip(&pod.netns, "route add 10.1.0.0/16 nhid 5");
    drop(pod.ready(&interface(Binding::Bridge)));
    tear_down(&pod.netns, pod.dir.path()).unwrap();
    // The nexthop object was deleted when the device went down.
    let route = pod.shows("route show 10.1.0.0/16");
    assert!(
        route.starts_with("10.1.0.0/16 via 10.244.1.1 dev eth0"),
        "{route}"
    );
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_restored_route_still_expires() {
    let pod = Pod::with_both_families();
    ip(
        &pod.netns,
        "-6 route add fd00:2::/64 via fd00:1::1 expires 3600 proto ra",
    );
    ip(
        &pod.netns,
        "addr add fd00:3::5/64 dev eth0 nodad valid_lft 7200 preferred_lft 3600",
    );
    drop(pod.ready(&interface(Binding::Bridge)));
    tear_down(&pod.netns, pod.dir.path()).unwrap();
    let address = pod.shows("-6 addr show dev eth0");
    assert!(
        address.contains("fd00:3::5/64 scope global nodad dynamic"),
        "{address}"
    );
    let route = pod.shows("-6 route show fd00:3::/64");
    assert!(route.contains("proto kernel"), "{route}");
    let route = pod.shows("-6 route show fd00:2::/64");
    assert!(
        route.contains("proto ra") && route.contains("expires 3"),
        "{route}"
    );
}
