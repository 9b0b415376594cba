//! The DHCP server, from the guest's end of the tap.

use std::net::Ipv4Addr;
use std::time::Duration;

use dhcproto::v4::{DhcpOption, Flags, Message, MessageType, OptionCode};
use dhcproto::{Decodable, Decoder, Encodable, Encoder};
use husk_network::dhcp::{DhcpOptions, DhcpServer, LONG_LEASE};
use husk_network::{Binding, MacAddr, Masquerade};
use husk_shim_testing::pod::{NODE_MAC, Pod, interface};

use crate::raw_guest::{QUIET, RawGuest, TIMEOUT};

const BROADCAST: (MacAddr, Ipv4Addr, u16) = (MacAddr([0xff; 6]), Ipv4Addr::BROADCAST, 67);

/// A client's message.
fn message(guest: &RawGuest, kind: MessageType, ciaddr: Ipv4Addr, wanted: Option<Ipv4Addr>) -> Vec<u8> {
    let none = Ipv4Addr::UNSPECIFIED;
    let mut message = Message::new_with_id(99, ciaddr, none, none, none, &guest.mac.0);
    message.set_flags(Flags::default());
    message.opts_mut().insert(DhcpOption::MessageType(kind));
    if let Some(wanted) = wanted {
        message.opts_mut().insert(DhcpOption::RequestedIpAddress(wanted));
    }
    let mut packet = Vec::new();
    message.encode(&mut Encoder::new(&mut packet)).unwrap();
    packet
}

/// The next reply. Sleeps so that the server can run on this thread.
async fn answer(guest: &mut RawGuest, limit: Duration) -> Option<(Ipv4Addr, Message)> {
    let step = Duration::from_millis(20);
    for _ in 0..limit.as_millis() / step.as_millis() {
        tokio::time::sleep(step / 2).await;
        if let Some((from, packet)) = guest.receive_udp(68, step / 2) {
            return Some((from, Message::decode(&mut Decoder::new(&packet)).unwrap()));
        }
    }
    None
}

fn lease_time(message: &Message) -> u32 {
    match message.opts().get(OptionCode::AddressLeaseTime) {
        Some(DhcpOption::AddressLeaseTime(seconds)) => *seconds,
        other => panic!("{other:?}"),
    }
}

/// Acquires a lease.
async fn acquire(guest: &mut RawGuest) -> (Ipv4Addr, Message) {
    let none = Ipv4Addr::UNSPECIFIED;
    let discover = message(guest, MessageType::Discover, none, None);
    let mut offer = None;
    for _ in 0..TIMEOUT.as_millis() / QUIET.as_millis() {
        guest.send_udp(BROADCAST, 68, &discover);
        offer = answer(guest, QUIET).await;
        if offer.is_some() {
            break;
        }
    }
    let (_, offer) = offer.expect("no offer");
    assert_eq!(offer.opts().msg_type(), Some(MessageType::Offer));
    let request = message(guest, MessageType::Request, none, Some(offer.yiaddr()));
    guest.send_udp(BROADCAST, 68, &request);
    let (server, ack) = loop {
        let (server, ack) = answer(guest, TIMEOUT).await.expect("no acknowledgement");
        // A slow duplicate of the offer.
        if ack.opts().msg_type() != Some(MessageType::Offer) {
            break (server, ack);
        }
    };
    assert_eq!(ack.opts().msg_type(), Some(MessageType::Ack));
    guest.ip = Some(ack.yiaddr());
    (server, ack)
}

#[tokio::test]
#[ignore = "needs root and /dev/net/tun"]
async fn a_bridged_guest_gets_the_pods_address() {
    let pod = Pod::with_address();
    let interface = interface(Binding::Bridge);
    let prepared = pod.ready(&interface);
    let server = DhcpServer::start(&pod.netns, &interface, &prepared, DhcpOptions::default())
        .unwrap()
        .unwrap();
    let mut guest = RawGuest::of(&prepared);
    let leased = server.leased();
    assert_eq!(*leased.borrow(), None);
    let (from, ack) = acquire(&mut guest).await;
    assert_eq!(*leased.borrow(), Some(ack.yiaddr()));
    assert_eq!(from, Ipv4Addr::new(169, 254, 75, 10));
    assert_eq!(ack.yiaddr(), Ipv4Addr::new(10, 244, 1, 5));
    assert_eq!(u64::from(lease_time(&ack)), LONG_LEASE.as_secs());
    let options = ack.opts();
    assert_eq!(
        options.get(OptionCode::InterfaceMtu),
        Some(&DhcpOption::InterfaceMtu(1450))
    );
    let gateway = Ipv4Addr::new(10, 244, 1, 1);
    assert_eq!(
        options.get(OptionCode::Router),
        Some(&DhcpOption::Router(vec![gateway]))
    );
    let routes = DhcpOption::ClasslessStaticRoute(vec![(Default::default(), gateway)]);
    assert_eq!(options.get(OptionCode::ClasslessStaticRoute), Some(&routes));
    assert!(guest.pings(gateway, NODE_MAC));

    // Other clients get no lease.
    let own = std::mem::replace(&mut guest.mac, MacAddr([2, 0, 0, 0, 0, 9]));
    let discover = message(&guest, MessageType::Discover, Ipv4Addr::UNSPECIFIED, None);
    guest.send_udp(BROADCAST, 68, &discover);
    assert!(answer(&mut guest, QUIET).await.is_none());
    guest.mac = own;

    server.stop().await;
    let discover = message(&guest, MessageType::Discover, Ipv4Addr::UNSPECIFIED, None);
    guest.send_udp(BROADCAST, 68, &discover);
    assert!(answer(&mut guest, QUIET).await.is_none(), "it has ended");
}

#[tokio::test]
#[ignore = "needs root and /dev/net/tun"]
async fn a_short_lease_is_renewed_by_way_of_the_gateway_and_rebound_by_broadcast() {
    for pod in [Pod::with_address(), Pod::with_link_local_gateway()] {
        let interface = interface(Binding::Bridge);
        let prepared = pod.ready(&interface);
        let options = DhcpOptions {
            lease_time: Duration::from_secs(60),
            ..DhcpOptions::default()
        };
        let _server = DhcpServer::start(&pod.netns, &interface, &prepared, options)
            .unwrap()
            .unwrap();
        let mut guest = RawGuest::of(&prepared);
        let (server, ack) = acquire(&mut guest).await;
        assert_eq!(lease_time(&ack), 60);
        assert_eq!(
            ack.opts().get(OptionCode::Renewal),
            Some(&DhcpOption::Renewal(30))
        );
        assert_eq!(
            ack.opts().get(OptionCode::Rebinding),
            Some(&DhcpOption::Rebinding(52))
        );
        let request = message(&guest, MessageType::Request, ack.yiaddr(), None);
        for to in [(NODE_MAC, server, 67), BROADCAST] {
            guest.send_udp(to, 68, &request);
            let (_, again) = answer(&mut guest, TIMEOUT).await.expect("no answer");
            assert_eq!(again.opts().msg_type(), Some(MessageType::Ack));
            assert_eq!(again.yiaddr(), ack.yiaddr());
        }
    }
}

#[tokio::test]
#[ignore = "needs root and /dev/net/tun"]
async fn a_masqueraded_guest_gets_its_own_address() {
    let pod = Pod::with_address();
    let interface = interface(Binding::Masquerade(Masquerade::default()));
    let prepared = pod.ready(&interface);
    let _server = DhcpServer::start(&pod.netns, &interface, &prepared, DhcpOptions::default())
        .unwrap()
        .unwrap();
    let mut guest = RawGuest::of(&prepared);
    let (from, ack) = acquire(&mut guest).await;
    assert_eq!(from, Ipv4Addr::new(10, 0, 2, 1));
    assert_eq!(ack.yiaddr(), Ipv4Addr::new(10, 0, 2, 2));
    assert!(ack.opts().get(OptionCode::ClasslessStaticRoute).is_none());
    assert!(guest.pings(Ipv4Addr::new(10, 244, 1, 1), MacAddr::GATEWAY));
    // Renewal at the gateway's own address must not cause "port unreachable".
    let request = message(&guest, MessageType::Request, ack.yiaddr(), None);
    guest.send_udp((MacAddr::GATEWAY, from, 67), 68, &request);
    let (_, again) = answer(&mut guest, TIMEOUT).await.expect("no answer");
    assert_eq!(again.opts().msg_type(), Some(MessageType::Ack));
    let refused = guest.expect(QUIET, |frame| (frame.get(23)? == &1).then(|| frame.to_vec()));
    assert_eq!(refused, None);
    // The guest has its address at a bridge now.
    guest.mac = MacAddr([2, 0, 0, 0, 0, 9]);
    let (_, ack) = acquire(&mut guest).await;
    assert_eq!(ack.yiaddr(), Ipv4Addr::new(10, 0, 2, 2));
    assert!(guest.pings(Ipv4Addr::new(10, 244, 1, 1), MacAddr::GATEWAY));
}

#[tokio::test]
#[ignore = "needs root and /dev/net/tun"]
async fn garbage_does_not_end_it() {
    let pod = Pod::with_address();
    let interface = interface(Binding::Bridge);
    let prepared = pod.ready(&interface);
    let _server = DhcpServer::start(&pod.netns, &interface, &prepared, DhcpOptions::default())
        .unwrap()
        .unwrap();
    let mut guest = RawGuest::of(&prepared);
    let good = message(&guest, MessageType::Discover, Ipv4Addr::UNSPECIFIED, None);
    // Truncated before the options.
    for cut in 0..240 {
        guest.send_udp(BROADCAST, 68, &good[..cut]);
    }
    guest.send_udp(BROADCAST, 68, &[0xff; 1400]);
    acquire(&mut guest).await;
}
