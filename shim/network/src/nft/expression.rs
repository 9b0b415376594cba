//! Rules: matches, followed by a statement.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::Ipv4Net;
use netlink_packet_core::DefaultNla;
use netlink_packet_netfilter::nftables::{
    Bitwise, Cmp, DataAttribute, Expressions, Immediate, Meta, MetaKey, Operator, Payload, Register, Verdict,
    VerdictAttribute,
};

use crate::interface::Port;

// linux/netfilter/nf_tables.h
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
const NAT_TYPE: u16 = 1;
const NAT_FAMILY: u16 = 2;
const NAT_ADDRESS: u16 = 3;
const SOURCE: u32 = 0;
const DESTINATION: u32 = 1;
/// Size of an interface name in the kernel, which compares all bytes.
const NAME_SIZE: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Rule {
    pub(super) expressions: Vec<Expressions>,
}

/// A rule that matches every packet.
pub(super) fn rule() -> Rule {
    Rule::default()
}

impl Rule {
    pub(super) fn saddr(self, address: IpAddr) -> Rule {
        let offset = if address.is_ipv4() { 12 } else { 8 };
        self.header(NETWORK_HEADER, offset, octets(address))
    }

    /// Matches sources in a network.
    pub(super) fn saddr_in(self, net: Ipv4Net) -> Rule {
        let value = |address: Ipv4Addr| DataAttribute::Value(address.octets().to_vec());
        self.and(Expressions::Payload(vec![
            Payload::DestinationRegister(Register::Reg1),
            Payload::Base(NETWORK_HEADER),
            Payload::Offset(12),
            Payload::Len(4),
        ]))
        .and(Expressions::Bitwise(vec![
            Bitwise::SourceRegister(Register::Reg1),
            Bitwise::DestinationRegister(Register::Reg1),
            Bitwise::Length(4),
            Bitwise::Mask(value(net.netmask())),
            Bitwise::Xor(value(Ipv4Addr::UNSPECIFIED)),
        ]))
        .compare(Operator::Equal, net.network().octets().to_vec())
    }

    pub(super) fn daddr(self, address: IpAddr) -> Rule {
        let offset = if address.is_ipv4() { 16 } else { 24 };
        self.header(NETWORK_HEADER, offset, octets(address))
    }

    /// Matches protocol and destination port.
    pub(super) fn dport(self, port: Port) -> Rule {
        self.meta(MetaKey::L4Proto, vec![port.protocol.number()]).header(
            TRANSPORT_HEADER,
            2,
            port.port.to_be_bytes().to_vec(),
        )
    }

    pub(super) fn iifname(self, device: &str) -> Rule {
        self.meta(MetaKey::Iifname, name(device))
    }

    pub(super) fn oifname(self, device: &str) -> Rule {
        self.meta(MetaKey::Oifname, name(device))
    }

    /// Matches output by other devices.
    pub(super) fn oifname_not(self, device: &str) -> Rule {
        self.load(MetaKey::Oifname)
            .compare(Operator::NotEqual, name(device))
    }

    pub(super) fn jump(self, chain: &str) -> Rule {
        self.and(Expressions::Immediate(vec![
            Immediate::DestinationRegister(Register::Verdict),
            Immediate::Data(DataAttribute::Verdict(vec![
                VerdictAttribute::Code(Verdict::Jump),
                VerdictAttribute::Chain(chain.to_owned()),
            ])),
        ]))
    }

    pub(super) fn drop(self) -> Rule {
        self.and(Expressions::Immediate(vec![
            Immediate::DestinationRegister(Register::Verdict),
            Immediate::Data(DataAttribute::Verdict(vec![VerdictAttribute::Code(
                Verdict::Other(libc::NF_DROP as u32),
            )])),
        ]))
    }

    pub(super) fn masquerade(self) -> Rule {
        self.and(Expressions::Other {
            expression_type: "masq".to_owned(),
            attributes: Vec::new(),
        })
    }

    pub(super) fn snat(self, address: IpAddr) -> Rule {
        self.translate(SOURCE, address)
    }

    pub(super) fn dnat(self, address: IpAddr) -> Rule {
        self.translate(DESTINATION, address)
    }

    fn translate(self, kind: u32, address: IpAddr) -> Rule {
        let family = if address.is_ipv4() {
            libc::NFPROTO_IPV4
        } else {
            libc::NFPROTO_IPV6
        };
        let number = |attribute, value: u32| DefaultNla::new(attribute, value.to_be_bytes().to_vec());
        self.and(Expressions::Immediate(vec![
            Immediate::DestinationRegister(Register::Reg1),
            Immediate::Data(DataAttribute::Value(octets(address))),
        ]))
        .and(Expressions::Other {
            expression_type: "nat".to_owned(),
            attributes: vec![
                number(NAT_TYPE, kind),
                number(NAT_FAMILY, family as u32),
                number(NAT_ADDRESS, Register::Reg1.into()),
            ],
        })
    }

    fn header(self, base: u32, offset: u32, value: Vec<u8>) -> Rule {
        self.and(Expressions::Payload(vec![
            Payload::DestinationRegister(Register::Reg1),
            Payload::Base(base),
            Payload::Offset(offset),
            Payload::Len(value.len() as u32),
        ]))
        .compare(Operator::Equal, value)
    }

    fn meta(self, key: MetaKey, value: Vec<u8>) -> Rule {
        self.load(key).compare(Operator::Equal, value)
    }

    fn load(self, key: MetaKey) -> Rule {
        self.and(Expressions::Meta(vec![
            Meta::DestinationRegister(Register::Reg1),
            Meta::Key(key),
        ]))
    }

    fn compare(self, how: Operator, value: Vec<u8>) -> Rule {
        self.and(Expressions::Cmp(vec![
            Cmp::SourceRegister(Register::Reg1),
            Cmp::Op(how),
            Cmp::Data(DataAttribute::Value(value)),
        ]))
    }

    fn and(mut self, expression: Expressions) -> Rule {
        self.expressions.push(expression);
        self
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn name(device: &str) -> Vec<u8> {
    let mut bytes = device.as_bytes().to_vec();
    bytes.resize(NAME_SIZE, 0);
    bytes
}
