//! DHCPv6 packets and ICMPv6 packets of a masqueraded guest, with nested options, to its IPv6 router. Asserts that
//! answers are well formed, are for the client that asked, and name no other address than the lease's.
#![no_main]

use std::net::Ipv6Addr;

use arbitrary::Arbitrary;
use husk_fuzz::host::{Splice, splice};
use husk_network::dhcp::DnsConfig;
use husk_network::dhcp::testing::{answer_icmpv6, answer_v6};
use husk_network::{Dhcpv6Lease, MacAddr};
use libfuzzer_sys::fuzz_target;

const ADDRESS: Ipv6Addr = Ipv6Addr::new(0xfd10, 0, 2, 0, 0, 0, 0, 2);
/// DUID-LL of the server.
const DUID: [u8; 10] = [0, 3, 0, 1, 2, 0, 0, 0, 0, 0];

#[derive(Arbitrary, Debug)]
struct Program {
    prefix: u8,
    mtu: u32,
    resolv_conf: String,
    packets: Vec<Packet>,
}

#[derive(Arbitrary, Debug)]
enum Packet {
    Dhcp {
        kind: u8,
        options: Vec<Item>,
        damage: Vec<Splice>,
    },
    Icmp(Vec<u8>),
}

#[derive(Arbitrary, Debug)]
enum Item {
    Client(Vec<u8>),
    Server,
    OtherServer(Vec<u8>),
    Association { id: u32, inner: Vec<Inner>, cut: u8 },
    RapidCommit,
    Any(u16, Vec<u8>),
    Bytes(Vec<u8>),
}

#[derive(Arbitrary, Debug)]
enum Inner {
    Lease,
    Address([u8; 16], Vec<u8>),
    Any(u16, Vec<u8>),
}

fn option(code: u16, value: &[u8]) -> Vec<u8> {
    let value = &value[..value.len().min(1400)];
    [
        &code.to_be_bytes()[..],
        &(value.len() as u16).to_be_bytes(),
        value,
    ]
    .concat()
}

impl Inner {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Inner::Lease => option(5, &[&ADDRESS.octets()[..], &[0; 8]].concat()),
            Inner::Address(address, more) => option(5, &[&address[..], &[0; 8], more].concat()),
            Inner::Any(code, value) => option(*code, value),
        }
    }
}

impl Item {
    fn bytes(&self) -> Vec<u8> {
        match self {
            Item::Client(id) => option(1, id),
            Item::Server => option(2, &DUID),
            Item::OtherServer(id) => option(2, id),
            Item::Association { id, inner, cut } => {
                let inner: Vec<u8> = inner.iter().take(16).flat_map(Inner::bytes).collect();
                let mut value = [&id.to_be_bytes()[..], &[0; 8], &inner].concat();
                value.truncate(value.len().saturating_sub((*cut).into()));
                option(3, &value)
            }
            Item::RapidCommit => option(14, &[]),
            Item::Any(code, value) => option(*code, value),
            Item::Bytes(bytes) => bytes.clone(),
        }
    }
}

fuzz_target!(|program: Program| {
    let lease = Dhcpv6Lease {
        address: format!("{ADDRESS}/{}", program.prefix % 129)
            .parse()
            .expect("an address"),
        server: MacAddr::GATEWAY,
        mtu: program.mtu,
    };
    let resolver = DnsConfig::parse(&program.resolv_conf);
    for packet in program.packets.iter().take(8) {
        match packet {
            Packet::Dhcp {
                kind,
                options,
                damage,
            } => {
                let mut asked = vec![kind % 14, b'x', b'i', b'd'];
                options
                    .iter()
                    .take(16)
                    .for_each(|option| asked.extend(option.bytes()));
                splice(&mut asked, damage);
                asked.truncate(1500);
                if let Some(answer) = answer_v6(lease, resolver.clone(), &asked) {
                    check(&asked, &answer);
                }
            }
            Packet::Icmp(packet) => {
                if let Some(advertisement) = answer_icmpv6(&lease, packet) {
                    assert_eq!((packet[0], packet[1]), (133, 0));
                    assert_eq!((advertisement[0], advertisement.len()), (134, 64));
                }
            }
        }
    }
});

/// The options of a packet, which must be whole.
fn whole(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut options = Vec::new();
    while !bytes.is_empty() {
        let (head, rest) = bytes.split_at(4);
        let (value, rest) = rest.split_at(u16::from_be_bytes([head[2], head[3]]).into());
        options.push((u16::from_be_bytes([head[0], head[1]]), value));
        bytes = rest;
    }
    options
}

fn check(asked: &[u8], answer: &[u8]) {
    assert!(matches!(answer[0], 2 | 7), "type {}", answer[0]);
    assert_eq!(answer[1..4], asked[1..4], "the transaction");
    let options = whole(&answer[4..]);
    let find = |code| {
        options
            .iter()
            .find(|(found, _)| *found == code)
            .map(|(_, value)| *value)
    };
    assert_eq!(find(2), Some(&DUID[..]));
    match find(1) {
        Some(client) => assert!(asked.windows(client.len().max(1)).any(|part| part == client)),
        None => assert_eq!(asked[0], 11, "only an information request needs no client"),
    }
    if let Some(association) = find(3) {
        let inner = whole(&association[12..]);
        assert_eq!(inner.len(), 1);
        assert_eq!((inner[0].0, &inner[0].1[..16]), (5, &ADDRESS.octets()[..]));
    }
    if answer[0] == 2 {
        assert_eq!(asked[0], 1, "advertised unasked");
    }
}
