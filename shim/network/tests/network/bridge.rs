//! The bridge binding.

use std::net::{Ipv4Addr, UdpSocket};
use std::process::Command;

use husk_network::{Binding, Interface, MacAddr, PRIMARY_NIC, TapOwner, secondary_nic, tap_counters};
use husk_shim_testing::pod::{NODE_MAC, POD_MAC, Pod, interface, ip, owner, switch};

use crate::raw_guest::{QUIET, RawGuest, TIMEOUT, ethernet};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 5);
const NODE: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn the_pod_looks_as_kubevirt_leaves_it() {
    let pod = Pod::with_both_families();
    let prepared = pod.ready(&interface(Binding::Bridge));
    assert_eq!(
        (prepared.mac, prepared.mtu, prepared.taps.len()),
        (POD_MAC, 1450, 1)
    );
    assert_eq!(prepared.nic.name, PRIMARY_NIC);

    let port = pod.shows("-d link show eth0-nic");
    assert!(
        port.contains("master k6t-eth0") && port.contains("learning off"),
        "{port}"
    );
    assert!(!port.contains(&POD_MAC.to_string()), "{port}");
    let tap = pod.shows("-d link show tap0");
    for word in ["master k6t-eth0", "mtu 1450", "vnet_hdr on", "persist on"] {
        assert!(tap.contains(word), "no {word}: {tap}");
    }
    // By name, if they have one.
    let TapOwner { uid, gid } = owner();
    for (kind, database, id) in [("user", "passwd", uid), ("group", "group", gid)] {
        let entry = Command::new("getent")
            .args([database, &id.to_string()])
            .output()
            .unwrap();
        let entry = String::from_utf8(entry.stdout).unwrap();
        let name = entry.split(':').next().filter(|name| !name.is_empty());
        let owner = format!("{kind} {}", name.map_or_else(|| id.to_string(), str::to_owned));
        assert!(tap.contains(&owner), "no {owner}: {tap}");
    }
    let placeholder = pod.shows("addr show eth0");
    assert!(
        placeholder.contains("inet 10.244.1.5/24") && !placeholder.contains("UP"),
        "{placeholder}"
    );
    let bridge = pod.shows("addr show k6t-eth0");
    assert!(
        bridge.contains("inet 169.254.75.10/32") && bridge.contains("mtu 1450"),
        "{bridge}"
    );
    assert!(placeholder.contains("inet6 fd00:1::5/64"), "{placeholder}");
    assert_eq!(pod.shows("route show") + &pod.shows("-6 route show"), "");
    assert_eq!(switch(&pod.netns, "ipv4/conf/all/arp_ignore"), "1");
    for device in ["k6t-eth0", "eth0-nic", "tap0"] {
        assert!(
            !pod.shows(&format!("addr show {device}")).contains("inet6"),
            "{device} has IPv6"
        );
    }
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn frames_pass_unchanged_both_ways() {
    let pod = Pod::with_address();
    let mut guest = RawGuest::of(&pod.ready(&interface(Binding::Bridge)));
    guest.ip = Some(ADDRESS);
    assert_eq!(guest.resolve(NODE, TIMEOUT), Some(NODE_MAC));
    assert!(guest.pings(NODE, NODE_MAC));
    let known = ip(&pod.node, "neigh show 10.244.1.5");
    assert!(known.contains(&POD_MAC.to_string()), "{known}");

    let counters = || tap_counters(&pod.netns, &[PRIMARY_NIC.to_owned()]).unwrap()[PRIMARY_NIC];
    let before = counters();
    let socket = pod.node.run(|| UdpSocket::bind((NODE, 0))).unwrap().unwrap();
    socket.send_to(b"in", (ADDRESS, 7)).unwrap();
    assert_eq!(guest.receive_udp(7, TIMEOUT), Some((NODE, b"in".to_vec())));
    let between = counters();
    assert!(between.received.frames > before.received.frames, "{between:?}");
    assert!(between.received.bytes > before.received.bytes, "{between:?}");
    let port = socket.local_addr().unwrap().port();
    guest.send_udp((NODE_MAC, NODE, port), 7, b"out");
    let mut buffer = [0; 10];
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let (length, from) = socket.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..length], from), (&b"out"[..], (ADDRESS, 7).into()));
    assert!(counters().sent.frames > between.sent.frames);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn bridge_forwards_frames_unchanged_between_guests() {
    let pods = Pod::neighbours();
    let mut guests = pods.each_ref().map(|pod| {
        let prepared = pod.ready(&interface(Binding::Bridge));
        RawGuest::of(&prepared)
    });
    let [one, two] = guests.each_ref().map(|guest| guest.mac);
    // Until both ports forward: the bridge drops earlier frames.
    let hello = ethernet(two, one, 0x88b5, b"hello");
    let heard = |_| {
        guests[0].send(&hello);
        guests[1].expect(QUIET, |seen| (seen == hello).then_some(()))
    };
    assert!((0..80).find_map(heard).is_some());
    let plain: Vec<u8> = (0..1400u32).map(|i| i as u8).collect();
    let tagged = [&[0, 5, 0x88, 0xb5][..], &plain[..1300]].concat();
    let frames = [
        // An experimental EtherType, the same with a VLAN tag, and an IPv6 multicast address.
        (two, 0x88b5, &plain),
        (two, 0x8100, &tagged),
        (MacAddr([0x33, 0x33, 0, 0, 0, 9]), 0x88b5, &plain),
        (MacAddr([0xff; 6]), 0x88b5, &plain),
    ];
    for (to, kind, payload) in frames {
        let frame = ethernet(to, one, kind, payload);
        guests[0].send(&frame);
        let same = |seen: &[u8]| (seen == frame).then_some(());
        assert!(guests[1].expect(TIMEOUT, same).is_some(), "{to} {kind:x}");
        // It is not sent back to its sender.
        assert!(guests[0].expect(QUIET, same).is_none(), "{to} {kind:x}");
    }
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn only_the_guest_answers_for_the_address() {
    let pod = Pod::with_address();
    let mut guest = RawGuest::of(&pod.ready(&interface(Binding::Bridge)));
    // The guest gets the ARP request and does not answer.
    let socket = pod.node.run(|| UdpSocket::bind((NODE, 0))).unwrap().unwrap();
    let ask = |_| {
        socket.send_to(b"in", (ADDRESS, 7)).unwrap();
        guest.expect(QUIET, |frame| (frame.get(12..14)? == [8, 6]).then_some(()))
    };
    // The kernel gives up ARP after 3 s, which the bridge may need to enable the port.
    assert!((0..40).find_map(ask).is_some());
    assert_eq!(guest.receive_udp(7, QUIET), None);
    let known = ip(&pod.node, "neigh show 10.244.1.5");
    assert!(!known.contains("lladdr"), "{known}");
    // The DHCP server's address must not answer either.
    ip(&pod.node, "route add 169.254.75.10 dev veth0");
    socket
        .send_to(b"in", (Ipv4Addr::new(169, 254, 75, 10), 67))
        .unwrap();
    guest.expect(QUIET, |_| None::<()>);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_gateway_known_by_a_static_neighbour_alone_is_reached() {
    let gateway = Ipv4Addr::new(169, 254, 1, 1);
    let host = Ipv4Addr::new(10, 0, 0, 1);
    let pod = Pod::with_link_local_gateway();
    let prepared = pod.ready(&interface(Binding::Bridge));
    let lease = prepared.lease.clone().unwrap();
    assert_eq!(lease.address.to_string(), "10.244.1.5/32");
    assert_eq!(lease.router, Some(gateway));
    let routes: Vec<String> = lease
        .routes
        .iter()
        .map(|(net, by)| format!("{net} {by}"))
        .collect();
    assert_eq!(routes, ["169.254.1.1/32 0.0.0.0", "0.0.0.0/0 169.254.1.1"]);

    let mut guest = RawGuest::of(&prepared);
    guest.ip = Some(ADDRESS);
    assert_eq!(guest.resolve(gateway, TIMEOUT), Some(NODE_MAC));
    assert!(guest.pings(host, NODE_MAC));

    // Without proxy ARP nobody answers.
    ip(
        &pod.netns,
        "link set eth0-nic type bridge_slave proxy_arp_wifi off",
    );
    assert_eq!(guest.resolve(gateway, QUIET), None);
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_pod_without_an_address_is_bridged() {
    let pod = Pod::bare();
    ip(&pod.node, "addr add 192.168.7.1/24 dev veth0");
    let prepared = pod.ready(&interface(Binding::Bridge));
    assert_eq!(prepared.lease, None);
    assert!(!pod.shows("link show").contains(" eth0:"));
    let mut guest = RawGuest::of(&prepared);
    guest.ip = Some(Ipv4Addr::new(192, 168, 7, 2));
    assert!(guest.pings(Ipv4Addr::new(192, 168, 7, 1), NODE_MAC));
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn the_manifest_chooses_address_and_queues() {
    let mac: MacAddr = "02:00:00:aa:bb:cc".parse().unwrap();
    let interface = Interface {
        mac: Some(mac),
        queues: 4,
        ..interface(Binding::Bridge)
    };
    let pod = Pod::with_address();
    ip(&pod.node, "link set veth0 mtu 9000");
    ip(&pod.netns, "link set eth0 mtu 9000");
    let prepared = pod.ready(&interface);
    assert_eq!((prepared.mac, prepared.taps.len()), (mac, 4));
    assert_eq!(prepared.mtu, 9000);
    for device in ["tap0", "k6t-eth0", "eth0-nic", "eth0"] {
        let shown = pod.shows(&format!("link show {device}"));
        assert!(shown.contains("mtu 9000"), "{shown}");
    }
    assert!(prepared.vhost.is_empty() || prepared.vhost.len() == 4);
    assert!(pod.shows("-d link show tap0").contains("multi_queue"));
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_second_interface_is_added_to_the_first() {
    let nic = secondary_nic("red");
    let pod = Pod::with_address();
    pod.add_veth(
        "veth1",
        MacAddr([2, 0, 0, 0, 1, 1]),
        &nic,
        MacAddr([2, 0, 0, 0, 1, 2]),
    );
    ip(&pod.node, "addr add 192.168.7.1/24 dev veth1");
    let second = Interface {
        name: "red".to_owned(),
        nic,
        index: 1,
        ..interface(Binding::Bridge)
    };
    let prepared = pod.prepare(&[interface(Binding::Bridge), second]).unwrap();
    assert_eq!(prepared[1].devices.tap, "tapb1f51a511f1");
    let mut guest = RawGuest::of(&prepared[1]);
    guest.ip = Some(Ipv4Addr::new(192, 168, 7, 2));
    assert!(guest.pings(Ipv4Addr::new(192, 168, 7, 1), MacAddr([2, 0, 0, 0, 1, 1])));
}
