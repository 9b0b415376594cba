//! Frames of a guest to the DHCPv4 server: whole ones around fuzzed BOOTP fields and options, some of them damaged.
//! Asserts that an answer is one whole frame to the guest, with right checksums, about the lease and nothing else.
#![no_main]

use std::net::Ipv4Addr;
use std::time::Duration;

use arbitrary::Arbitrary;
use husk_fuzz::host::{Splice, splice};
use husk_network::dhcp::{DhcpOptions, DnsConfig, testing::answer_frame};
use husk_network::{DhcpLease, MacAddr};
use libfuzzer_sys::fuzz_target;

const GUEST: MacAddr = MacAddr([0x0a, 0x58, 10, 244, 1, 5]);
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 5);
const SERVER: Ipv4Addr = Ipv4Addr::new(169, 254, 75, 10);

#[derive(Arbitrary, Debug)]
struct Program {
    given: Given,
    frames: Vec<Frame>,
}

/// The lease of the server.
#[derive(Arbitrary, Debug)]
struct Given {
    prefix: u8,
    router: bool,
    routes: Vec<([u8; 4], u8, [u8; 4])>,
    mtu: u32,
    resolv_conf: String,
    subdomain: Option<String>,
    hostname: Option<String>,
    ntp_servers: Vec<[u8; 4]>,
    tftp_server: Option<String>,
    private: Vec<(u8, String)>,
    lease_seconds: u32,
    any_client: bool,
}

#[derive(Arbitrary, Debug)]
struct Frame {
    flags: u16,
    ciaddr: Address,
    giaddr: Option<[u8; 4]>,
    /// Bytes of the BOOTP fields.
    fields: Vec<(u8, u8)>,
    options: Vec<DhcpOption>,
    no_end: bool,
    /// Changes of the whole frame.
    damage: Vec<Splice>,
}

#[derive(Arbitrary, Debug)]
enum Address {
    None,
    Guest,
    Server,
    Other([u8; 4]),
}

impl Address {
    fn octets(&self) -> [u8; 4] {
        match self {
            Address::None => [0; 4],
            Address::Guest => ADDRESS.octets(),
            Address::Server => SERVER.octets(),
            Address::Other(octets) => *octets,
        }
    }
}

#[derive(Arbitrary, Debug)]
enum DhcpOption {
    Type(u8),
    Requested(Address),
    Server(Address),
    Client(Vec<u8>),
    Any(u8, Vec<u8>),
    Bytes(Vec<u8>),
}

impl Given {
    fn lease(&self) -> Option<(DhcpLease, DhcpOptions)> {
        let mut routes = Vec::new();
        for (to, prefix, by) in self.routes.iter().take(80) {
            let net = format!("{}/{}", Ipv4Addr::from(*to), prefix % 33);
            routes.push((net.parse().ok()?, Ipv4Addr::from(*by)));
        }
        let mut resolver = DnsConfig::parse(&self.resolv_conf);
        if let Some(subdomain) = &self.subdomain {
            resolver = resolver.with_subdomain(subdomain).ok()?;
        }
        let lease = DhcpLease {
            client: (!self.any_client).then_some(GUEST),
            address: format!("{ADDRESS}/{}", self.prefix % 33).parse().ok()?,
            server: SERVER,
            router: self.router.then_some(SERVER),
            routes,
            mtu: self.mtu,
        };
        let options = DhcpOptions {
            hostname: self.hostname.clone(),
            resolver,
            ntp_servers: self.ntp_servers.iter().copied().map(Ipv4Addr::from).collect(),
            tftp_server: self.tftp_server.clone(),
            boot_file: None,
            private: self.private.clone(),
            lease_time: Duration::from_secs(self.lease_seconds.into()),
        };
        Some((lease, options))
    }
}

impl Frame {
    fn bytes(&self) -> Vec<u8> {
        let mut packet = vec![0; 240];
        packet[..4].copy_from_slice(&[1, 1, 6, 0]);
        packet[4..8].copy_from_slice(b"xid0");
        packet[10..12].copy_from_slice(&self.flags.to_be_bytes());
        packet[12..16].copy_from_slice(&self.ciaddr.octets());
        packet[24..28].copy_from_slice(&self.giaddr.unwrap_or_default());
        packet[28..34].copy_from_slice(&GUEST.0);
        packet[236..].copy_from_slice(&[99, 130, 83, 99]);
        for (at, byte) in self.fields.iter().take(8) {
            packet[usize::from(*at) % 240] = *byte;
        }
        for option in self.options.iter().take(32) {
            let (code, value) = match option {
                DhcpOption::Type(kind) => (53, vec![*kind]),
                DhcpOption::Requested(address) => (50, address.octets().to_vec()),
                DhcpOption::Server(address) => (54, address.octets().to_vec()),
                DhcpOption::Client(id) => (61, id.clone()),
                DhcpOption::Any(code, value) => (*code, value.clone()),
                DhcpOption::Bytes(bytes) => {
                    packet.extend(bytes);
                    continue;
                }
            };
            let value = &value[..value.len().min(255)];
            packet.extend([code, value.len() as u8]);
            packet.extend(value);
        }
        if !self.no_end {
            packet.push(255);
        }
        packet.truncate(1500);
        let (udp, ip) = (packet.len() as u16 + 8, packet.len() as u16 + 28);
        let mut frame = [&[0xff; 6][..], &GUEST.0, &[8, 0, 0x45, 0]].concat();
        frame.extend(ip.to_be_bytes());
        frame.extend([
            0, 0, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 68, 0, 67,
        ]);
        frame.extend(udp.to_be_bytes());
        frame.extend([0, 0]);
        frame.extend(packet);
        splice(&mut frame, &self.damage);
        frame
    }
}

fuzz_target!(|program: Program| {
    let Some((lease, options)) = program.given.lease() else {
        return;
    };
    for frame in program.frames.iter().take(8) {
        let asked = frame.bytes();
        if let Some((answer, leases)) = answer_frame(lease.clone(), options.clone(), &asked) {
            if !program.given.any_client {
                assert_eq!(asked[6..12], GUEST.0, "answered another client");
                // The client's address in the answer, which has no IP options.
                assert_eq!(answer[70..76], GUEST.0);
            }
            check(&answer, leases);
            assert_eq!(answer[..6], asked[6..12]);
            if frame.damage.is_empty() && frame.fields.is_empty() {
                assert!(frame.giaddr.is_none_or(|relay| relay == [0; 4]));
                assert_eq!(answer[46..50], *b"xid0");
            }
        }
    }
});

fn number(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]))
}

/// Sum of a part in ones' complement: 0xffff with a right checksum.
fn sum(parts: &[&[u8]]) -> u32 {
    let bytes = parts.concat();
    let sum = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
        .sum::<u32>();
    let folded = (sum >> 16) + (sum & 0xffff);
    (folded >> 16) + (folded & 0xffff)
}

fn check(frame: &[u8], leases: bool) {
    assert_eq!(frame[6..12], MacAddr::GATEWAY.0);
    assert_eq!(frame[12..15], [8, 0, 0x45]);
    let ip = &frame[14..];
    assert_eq!(number(ip, 2), ip.len());
    assert_eq!(sum(&[&ip[..20]]), 0xffff);
    assert_eq!(ip[12..16], SERVER.octets());
    let udp = &ip[20..];
    assert_eq!(
        (number(udp, 0), number(udp, 2), number(udp, 4)),
        (67, 68, udp.len())
    );
    assert_eq!(sum(&[&ip[12..20], &[0, 17, udp[4], udp[5]], udp]), 0xffff);
    let packet = &udp[8..];
    assert_eq!((packet[0], packet[2]), (2, 6));
    assert_eq!(packet[236..240], [99, 130, 83, 99]);
    let mut rest = &packet[240..];
    let (mut kind, mut server, mut codes) = (None, None, Vec::new());
    while let [code @ 1..=254, length, tail @ ..] = rest {
        let (value, tail) = tail.split_at(usize::from(*length));
        match code {
            53 => kind = value.first().copied(),
            54 => server = Some(value.to_vec()),
            _ => {}
        }
        codes.push(*code);
        rest = tail;
    }
    assert_eq!(rest.first(), Some(&255), "the options have an end");
    assert_eq!(server, Some(SERVER.octets().to_vec()));
    match kind {
        Some(2 | 5) => {
            assert_eq!(packet[16..20], ADDRESS.octets());
            assert!(codes.contains(&1) && codes.contains(&51));
        }
        Some(6) => {
            assert_eq!(packet[16..20], [0; 4]);
            assert!(codes.iter().all(|code| matches!(code, 53 | 54 | 61)), "{codes:?}");
        }
        other => panic!("an answer of type {other:?}"),
    }
    assert_eq!(leases, kind == Some(5));
}
