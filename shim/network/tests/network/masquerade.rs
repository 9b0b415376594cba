//! The masquerade binding.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::process::Command;

use husk_network::dhcp::{DhcpOptions, DhcpServer};
use husk_network::{Binding, MacAddr, Masquerade, Port, Protocol, tear_down};
use husk_shim_testing::pod::{Pod, interface, switch};

use crate::raw_guest::{QUIET, RawGuest, TIMEOUT, checksum, ethernet};

const POD: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 5);
const NODE: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 1);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

fn masquerade(ports: &[(Protocol, u16)]) -> Binding {
    let port = |(protocol, port): &(Protocol, u16)| Port {
        protocol: *protocol,
        port: *port,
    };
    Binding::Masquerade(Masquerade {
        ports: ports.iter().map(port).collect(),
        ..Masquerade::default()
    })
}

fn guest_of(pod: &Pod, ports: &[(Protocol, u16)]) -> RawGuest {
    let mut guest = RawGuest::of(&pod.ready(&interface(masquerade(ports))));
    guest.ip = Some(GUEST);
    // The bridge drops frames until its port forwards.
    assert_eq!(guest.resolve(GATEWAY, TIMEOUT), Some(MacAddr::GATEWAY));
    guest
}

fn node_socket(pod: &Pod) -> UdpSocket {
    let socket = pod.node.run(|| UdpSocket::bind((NODE, 0))).unwrap().unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn the_guest_is_behind_the_pods_address() {
    let pod = Pod::with_address();
    let mut guest = guest_of(&pod, &[]);
    assert!(guest.pings(NODE, MacAddr::GATEWAY));
    assert!(pod.shows("addr show eth0").contains("inet 10.244.1.5/24"));
    assert_eq!(switch(&pod.netns, "ipv4/ip_forward"), "1");
    // Packets to 127.0.0.1 from other hosts stay out.
    for (device, value) in [("all", "0"), ("eth0", "0"), ("k6t-eth0", "1")] {
        let name = format!("ipv4/conf/{device}/route_localnet");
        assert_eq!(switch(&pod.netns, &name), value, "{device}");
    }

    let socket = node_socket(&pod);
    let port = socket.local_addr().unwrap().port();
    guest.send_udp((MacAddr::GATEWAY, NODE, port), 5000, b"out");
    let mut buffer = [0; 10];
    let (length, from) = socket.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..length], from.ip()), (&b"out"[..], IpAddr::V4(POD)));
    // The reply is translated back.
    socket.send_to(b"back", from).unwrap();
    assert_eq!(guest.receive_udp(5000, TIMEOUT), Some((NODE, b"back".to_vec())));
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn every_port_leads_to_the_guest() {
    let pod = Pod::with_address();
    let mut guest = guest_of(&pod, &[]);
    let socket = node_socket(&pod);
    socket.send_to(b"in", (POD, 8080)).unwrap();
    assert_eq!(guest.receive_udp(8080, TIMEOUT), Some((NODE, b"in".to_vec())));
    // From the pod's own loopback the gateway is the source.
    let own = pod.netns.run(|| UdpSocket::bind("127.0.0.1:0")).unwrap().unwrap();
    own.send_to(b"own", "127.0.0.1:8080").unwrap();
    assert_eq!(guest.receive_udp(8080, TIMEOUT), Some((GATEWAY, b"own".to_vec())));
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn only_listed_ports_do() {
    let pod = Pod::with_address();
    let mut guest = guest_of(&pod, &[(Protocol::Udp, 80), (Protocol::Tcp, 81)]);
    let socket = node_socket(&pod);
    socket.send_to(b"in", (POD, 80)).unwrap();
    assert_eq!(guest.receive_udp(80, TIMEOUT), Some((NODE, b"in".to_vec())));
    for port in [81, 82] {
        socket.send_to(b"in", (POD, port)).unwrap();
        assert_eq!(guest.receive_udp(port, QUIET), None, "{port}");
    }
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn a_thousand_ports_may_be_listed() {
    let pod = Pod::with_address();
    let ports: Vec<(Protocol, u16)> = (1..=1000).map(|port| (Protocol::Udp, port)).collect();
    let mut guest = guest_of(&pod, &ports);
    let socket = node_socket(&pod);
    socket.send_to(b"in", (POD, 1000)).unwrap();
    assert_eq!(guest.receive_udp(1000, TIMEOUT), Some((NODE, b"in".to_vec())));
}

#[test]
#[ignore = "needs root and /dev/net/tun"]
fn existing_chains_of_the_same_names_are_allowed() {
    let pod = Pod::with_address();
    let nft = |words: &str| {
        let output = pod.netns.run(|| Command::new("nft").arg(words).output());
        let output = output
            .unwrap()
            .expect("this test needs the command nft, of nftables");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    for words in [
        "add table ip nat",
        "add chain ip nat prerouting { type nat hook prerouting priority -100; }",
        "add chain ip nat postrouting { type nat hook postrouting priority 100; }",
        "add rule ip nat prerouting udp dport 99 redirect to 22",
    ] {
        nft(words);
    }
    let before = nft("list ruleset");
    let mut guest = guest_of(&pod, &[]);
    assert!(guest.pings(NODE, MacAddr::GATEWAY));
    let socket = node_socket(&pod);
    socket.send_to(b"in", (POD, 8080)).unwrap();
    assert_eq!(guest.receive_udp(8080, TIMEOUT), Some((NODE, b"in".to_vec())));
    let own = pod.netns.run(|| UdpSocket::bind("127.0.0.1:0")).unwrap().unwrap();
    own.send_to(b"own", "127.0.0.1:8080").unwrap();
    assert_eq!(guest.receive_udp(8080, TIMEOUT), Some((GATEWAY, b"own".to_vec())));
    // The other program's rules see it first.
    let local = pod.netns.run(|| UdpSocket::bind((POD, 22))).unwrap().unwrap();
    local.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket.send_to(b"them", (POD, 99)).unwrap();
    assert_eq!(local.recv(&mut [0; 9]).unwrap(), 4);
    drop(guest);
    tear_down(&pod.netns, pod.dir.path()).unwrap();
    assert_eq!(nft("list ruleset"), before);
}

#[tokio::test]
#[ignore = "needs root and /dev/net/tun"]
async fn ipv6_is_advertised_and_translated() {
    uses_ipv6(&Pod::with_both_families()).await;
}

#[tokio::test]
#[ignore = "needs root and /dev/net/tun"]
async fn a_guest_has_no_ipv4_where_the_pod_has_none() {
    let pod = Pod::with_ipv6();
    uses_ipv6(&pod).await;
    assert_eq!(pod.ready(&interface(masquerade(&[]))).lease, None);
    assert_eq!(pod.shows("-4 addr show k6t-eth0"), "");
    assert_eq!(switch(&pod.netns, "ipv4/ip_forward"), "0");
}

async fn uses_ipv6(pod: &Pod) {
    let interface = interface(masquerade(&[]));
    let prepared = pod.ready(&interface);
    let mut guest = RawGuest::of(&prepared);
    let server = DhcpServer::start(&pod.netns, &interface, &prepared, DhcpOptions::default())
        .unwrap()
        .unwrap();

    // Solicit a router until one answers.
    let own: Ipv6Addr = "fe80::2".parse().unwrap();
    let solicit = icmpv6(own, "ff02::2".parse().unwrap(), &[133, 0, 0, 0, 0, 0, 0, 0]);
    let mut advertised = None;
    for _ in 0..40 {
        guest.send(&ethernet(
            MacAddr([0x33, 0x33, 0, 0, 0, 2]),
            guest.mac,
            0x86dd,
            &solicit,
        ));
        tokio::time::sleep(QUIET).await;
        advertised = guest.expect(QUIET, |frame| {
            let advertisement = frame.get(12..14)? == [0x86, 0xdd] && frame.get(54)? == &134;
            advertisement.then(|| frame.to_vec())
        });
        if advertised.is_some() {
            break;
        }
    }
    let frame = advertised.expect("no advertisement");
    assert_eq!(frame[6..12], MacAddr::GATEWAY.0);
    assert_eq!(frame[59] & 0xc0, 0xc0);

    // The node sees the pod's address.
    let socket = pod
        .node
        .run(|| UdpSocket::bind("[fd00:1::1]:0"))
        .unwrap()
        .unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let port = socket.local_addr().unwrap().port();
    let (from, to) = ("fd10:0:2::2".parse().unwrap(), "fd00:1::1".parse().unwrap());
    let mut udp = [5000u16, port, 11, 0].map(u16::to_be_bytes).concat();
    udp.extend(b"out");
    let sum = pseudo_checksum(from, to, 17, &udp);
    udp[6..8].copy_from_slice(&sum.to_be_bytes());
    guest.send(&ethernet(
        MacAddr::GATEWAY,
        guest.mac,
        0x86dd,
        &ipv6(17, from, to, &udp),
    ));
    let mut buffer = [0; 10];
    let (length, from) = socket.recv_from(&mut buffer).unwrap();
    let expected: IpAddr = "fd00:1::5".parse().unwrap();
    assert_eq!(
        (&buffer[..length], SocketAddr::ip(&from)),
        (&b"out"[..], expected)
    );
    server.stop().await;
}

fn ipv6(next: u8, from: Ipv6Addr, to: Ipv6Addr, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u16).to_be_bytes();
    [
        &[0x60, 0, 0, 0, length[0], length[1], next, 255][..],
        &from.octets(),
        &to.octets(),
        payload,
    ]
    .concat()
}

fn icmpv6(from: Ipv6Addr, to: Ipv6Addr, message: &[u8]) -> Vec<u8> {
    let mut message = message.to_vec();
    let sum = pseudo_checksum(from, to, 58, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    ipv6(58, from, to, &message)
}

fn pseudo_checksum(from: Ipv6Addr, to: Ipv6Addr, next: u8, payload: &[u8]) -> u16 {
    let length = (payload.len() as u32).to_be_bytes();
    checksum(
        &[
            &from.octets()[..],
            &to.octets(),
            &length,
            &[0, 0, 0, next],
            payload,
        ]
        .concat(),
    )
}
