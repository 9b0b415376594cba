use super::*;
use crate::dhcp::options::DnsConfig;
use crate::mac::MacAddr;
use ipnet::Ipv4Net;
use proptest::prelude::*;

const GUEST: MacAddr = MacAddr([0x0a, 0x58, 10, 244, 1, 5]);
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 5);
const SERVER: Ipv4Addr = Ipv4Addr::new(169, 254, 75, 10);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

fn server() -> Dhcpv4Responder {
    server_for(Some(GUEST))
}

fn server_for(client: Option<MacAddr>) -> Dhcpv4Responder {
    let on_link = (Ipv4Net::from(GATEWAY), Ipv4Addr::UNSPECIFIED);
    let default = (Ipv4Net::default(), GATEWAY);
    let lease = DhcpLease {
        client,
        address: Ipv4Net::from(ADDRESS),
        server: SERVER,
        router: Some(GATEWAY),
        routes: vec![on_link, default],
        mtu: 1450,
    };
    let options = DhcpOptions {
        hostname: Some("vm".to_owned()),
        resolver: DnsConfig::parse("nameserver 10.96.0.10\nsearch default.svc.cluster.local cluster.local\n"),
        ntp_servers: vec![Ipv4Addr::new(10, 0, 0, 1)],
        tftp_server: Some("tftp.local".to_owned()),
        boot_file: Some("/boot/x".to_owned()),
        private: vec![(240, "private".to_owned())],
        ..DhcpOptions::default()
    };
    Dhcpv4Responder::new(lease, options).unwrap()
}

fn asking(kind: MessageType, mac: MacAddr) -> Message {
    let none = Ipv4Addr::UNSPECIFIED;
    let mut message = Message::new_with_id(7, none, none, none, none, &mac.0);
    message.opts_mut().insert(DhcpOption::MessageType(kind));
    message
}

fn encoded(message: &Message) -> Vec<u8> {
    let mut packet = Vec::new();
    message.encode(&mut dhcproto::Encoder::new(&mut packet)).unwrap();
    packet
}

fn answer(message: &Message) -> Option<(Ipv4Addr, Message)> {
    let answer = server().answer(&encoded(message))?;
    let decoded = Message::decode(&mut Decoder::new(&answer.packet)).unwrap();
    Some((answer.to, decoded))
}

#[test]
fn discover_is_answered_by_an_offer_of_everything() {
    let (to, offer) = answer(&asking(MessageType::Discover, GUEST)).unwrap();
    assert_eq!((to, offer.yiaddr(), offer.xid()), (ADDRESS, ADDRESS, 7));
    let options = offer.opts();
    assert_eq!(options.msg_type(), Some(MessageType::Offer));
    let expected = [
        DhcpOption::SubnetMask(Ipv4Addr::BROADCAST),
        DhcpOption::Router(vec![GATEWAY]),
        DhcpOption::DomainNameServer(vec![Ipv4Addr::new(10, 96, 0, 10)]),
        DhcpOption::Hostname("vm".to_owned()),
        DhcpOption::DomainName("default.svc.cluster.local".to_owned()),
        DhcpOption::InterfaceMtu(1450),
        DhcpOption::NtpServers(vec![Ipv4Addr::new(10, 0, 0, 1)]),
        DhcpOption::AddressLeaseTime(86_313_600),
        DhcpOption::ServerIdentifier(SERVER),
        DhcpOption::TFTPServerName(b"tftp.local".to_vec()),
        DhcpOption::BootfileName(b"/boot/x".to_vec()),
        DhcpOption::ClasslessStaticRoute(server().lease.routes),
    ];
    for option in expected {
        assert_eq!(options.get(OptionCode::from(&option)), Some(&option));
    }
    assert!(options.contains(OptionCode::DomainSearch));
    let private = options.iter().find(|(code, _)| u8::from(**code) == 240);
    assert!(
        format!("{private:?}").contains(&format!("{:?}", b"private".to_vec())),
        "{private:?}"
    );
}

#[test]
fn a_request_for_the_address_is_acknowledged() {
    let mut request = asking(MessageType::Request, GUEST);
    request.opts_mut().insert(DhcpOption::RequestedIpAddress(ADDRESS));
    request.opts_mut().insert(DhcpOption::ServerIdentifier(SERVER));
    request
        .opts_mut()
        .insert(DhcpOption::ClientIdentifier(vec![255, 1, 2]));
    request.set_flags(Flags::default().set_broadcast());
    let (to, ack) = answer(&request).unwrap();
    assert_eq!(ack.opts().msg_type(), Some(MessageType::Ack));
    assert_eq!(to, Ipv4Addr::BROADCAST);
    assert_eq!(
        ack.opts().get(OptionCode::ClientIdentifier),
        Some(&DhcpOption::ClientIdentifier(vec![255, 1, 2]))
    );
}

#[test]
fn renewing_keeps_the_address() {
    let mut request = asking(MessageType::Request, GUEST);
    request.set_ciaddr(ADDRESS);
    let (to, ack) = answer(&request).unwrap();
    assert_eq!(ack.opts().msg_type(), Some(MessageType::Ack));
    assert_eq!((to, ack.yiaddr()), (ADDRESS, ADDRESS));
}

#[test]
fn another_address_is_denied() {
    let mut request = asking(MessageType::Request, GUEST);
    request
        .opts_mut()
        .insert(DhcpOption::RequestedIpAddress(Ipv4Addr::new(10, 0, 0, 9)));
    let (to, nak) = answer(&request).unwrap();
    assert_eq!(nak.opts().msg_type(), Some(MessageType::Nak));
    assert_eq!((to, nak.yiaddr()), (Ipv4Addr::BROADCAST, Ipv4Addr::UNSPECIFIED));
    assert!(!nak.opts().contains(OptionCode::SubnetMask));
}

#[test]
fn without_a_client_address_each_client_gets_the_lease() {
    let other = MacAddr([2; 6]);
    let answer = server_for(None).answer(&encoded(&asking(MessageType::Discover, other)));
    let offer = Message::decode(&mut Decoder::new(&answer.unwrap().packet)).unwrap();
    assert_eq!((offer.chaddr(), offer.yiaddr()), (&other.0[..], ADDRESS));
}

#[test]
fn others_are_not_answered() {
    assert_eq!(answer(&asking(MessageType::Discover, MacAddr([2; 6]))), None);
    assert_eq!(answer(&asking(MessageType::Offer, GUEST)), None);
    let mut relayed = asking(MessageType::Discover, GUEST);
    relayed.set_giaddr(Ipv4Addr::new(10, 0, 0, 1));
    assert_eq!(answer(&relayed), None);
    let mut elsewhere = asking(MessageType::Request, GUEST);
    elsewhere
        .opts_mut()
        .insert(DhcpOption::RequestedIpAddress(ADDRESS));
    elsewhere
        .opts_mut()
        .insert(DhcpOption::ServerIdentifier(Ipv4Addr::new(10, 0, 0, 1)));
    assert_eq!(answer(&elsewhere), None);
    let mut packet = encoded(&asking(MessageType::Discover, GUEST));
    packet[236] = 0;
    assert_eq!(server().answer(&packet), None);
}

#[test]
fn an_address_length_beyond_the_field_is_no_panic() {
    for length in [0, 5, 17, 255] {
        let mut packet = encoded(&asking(MessageType::Discover, GUEST));
        packet[2] = length;
        assert_eq!(server().answer(&packet), None);
    }
}

#[test]
fn the_default_route_outlives_too_many_others() {
    let mut server = server();
    let many = (0..100).map(|i| (Ipv4Net::from(Ipv4Addr::new(192, 168, 0, i)), GATEWAY));
    server.lease.routes.splice(1..1, many);
    let Some(DhcpOption::ClasslessStaticRoute(routes)) = server.routes() else {
        panic!("no routes");
    };
    assert_eq!(routes.first(), server.lease.routes.first());
    assert_eq!(routes.last(), server.lease.routes.last());
    assert!((20..40).contains(&routes.len()), "{}", routes.len());
}

#[test]
fn options_that_fill_more_than_a_frame_are_refused() {
    let with = |private: &[(u8, usize)], mtu| {
        let Dhcpv4Responder { mut lease, options } = server();
        lease.mtu = mtu;
        let private = private.iter().map(|(code, length)| (*code, "x".repeat(*length)));
        let options = DhcpOptions {
            private: private.collect(),
            ..options
        };
        Dhcpv4Responder::new(lease, options)
    };
    let five = [224, 225, 226, 227, 228].map(|code| (code, 255));
    let error = with(&five, 1500).unwrap_err().to_string();
    assert!(
        error.starts_with("dhcpOptions: ") && error.contains("1472"),
        "{error}"
    );
    with(&five, 9000).unwrap();

    // The longest that fit, to a guest with a long client identifier.
    let mut request = asking(MessageType::Discover, GUEST);
    let id = DhcpOption::ClientIdentifier(vec![1; CLIENT_ID_ROOM]);
    request.opts_mut().insert(id);
    let longest = (0..=255).rev();
    let last = |length| with(&[(224, 255), (225, 255), (226, length)], 1200).ok();
    let server = longest.filter_map(last).next().unwrap();
    assert_eq!(server.answer(&encoded(&request)).unwrap().packet.len(), 1200 - 28);
}

proptest! {
    #[test]
    fn any_bytes_are_handled(bytes in proptest::collection::vec(any::<u8>(), 0..700)) {
        let _ = server().answer(&bytes);
    }

    #[test]
    fn corrupted_packets_are_handled(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
        tail in proptest::collection::vec(any::<u8>(), 0..100),
        cut: proptest::sample::Index,
    ) {
        let mut packet = encoded(&asking(MessageType::Discover, GUEST));
        // Truncated options of any code and length.
        packet.pop();
        packet.extend(tail);
        for (at, byte) in changes {
            let at = at.index(packet.len());
            packet[at] = byte;
        }
        packet.truncate(cut.index(packet.len() + 1));
        if let Some(answer) = server().answer(&packet) {
            let mac = Message::decode(&mut Decoder::new(&answer.packet)).unwrap();
            prop_assert_eq!(mac.chaddr(), &GUEST.0);
        }
    }
}
