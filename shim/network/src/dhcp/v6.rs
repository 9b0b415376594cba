//! DHCPv6 (RFC 8415) for one masqueraded guest: computes replies without I/O.

use dhcproto::v6::{DhcpOption, IAAddr, IANA, Message, MessageType, OptionCode, Status, StatusCode};
use dhcproto::{Decodable, Decoder, Encodable, Encoder, Name};

use super::super::lease::Dhcpv6Lease;
use super::option_filter;
use super::options::DnsConfig;

const INFINITE_LIFETIME: u32 = u32::MAX;
/// Larger than any guest's request, in bytes.
pub(super) const MAX_PACKET: usize = 1500;

#[derive(Debug, Clone)]
pub(super) struct Dhcpv6Responder {
    lease: Dhcpv6Lease,
    resolver: DnsConfig,
}

impl Dhcpv6Responder {
    pub(super) fn new(lease: Dhcpv6Lease, resolver: DnsConfig) -> Dhcpv6Responder {
        Dhcpv6Responder { lease, resolver }
    }

    pub(super) fn lease(&self) -> &Dhcpv6Lease {
        &self.lease
    }

    /// Reply to a packet, if it needs one.
    pub(super) fn answer(&self, packet: &[u8]) -> Option<Vec<u8>> {
        let asked = Message::decode(&mut Decoder::new(&option_filter::v6(packet)?)).ok()?;
        let options = asked.opts();
        let client = match options.get(OptionCode::ClientId) {
            Some(DhcpOption::ClientId(id)) => Some(id.clone()),
            _ => None,
        };
        let server = match options.get(OptionCode::ServerId) {
            Some(DhcpOption::ServerId(id)) => Some(id.as_slice() == self.duid()),
            _ => None,
        };
        let rapid = options.get(OptionCode::RapidCommit).is_some();
        let kind = match (asked.msg_type(), client.is_some(), server) {
            (MessageType::Solicit, true, None) if rapid => MessageType::Reply,
            (MessageType::Solicit, true, None) => MessageType::Advertise,
            (
                MessageType::Request | MessageType::Renew | MessageType::Release | MessageType::Decline,
                true,
                Some(true),
            )
            | (MessageType::Rebind | MessageType::Confirm, true, None)
            | (MessageType::InformationRequest, _, None | Some(true)) => MessageType::Reply,
            _ => return None,
        };
        let mut answer = Message::new_with_id(kind, asked.xid());
        let given = answer.opts_mut();
        given.insert(DhcpOption::ServerId(self.duid().to_vec()));
        given.extend_from(client.map(DhcpOption::ClientId));
        match asked.msg_type() {
            MessageType::Release | MessageType::Decline => given.insert(success()),
            MessageType::Confirm => given.insert(self.confirm(&asked)),
            MessageType::InformationRequest => given.extend_from(self.dns_options()),
            _ => {
                given.extend_from(self.address_option(&asked));
                given.extend_from(self.dns_options());
                if rapid && kind == MessageType::Reply {
                    given.insert(DhcpOption::RapidCommit);
                }
            }
        }
        let mut packet = Vec::new();
        answer.encode(&mut Encoder::new(&mut packet)).ok()?;
        Some(packet)
    }

    /// DUID-LL of the bridge's MAC address.
    fn duid(&self) -> [u8; 10] {
        let mut id = [0, 3, 0, 1, 0, 0, 0, 0, 0, 0];
        id[4..].copy_from_slice(&self.lease.server.0);
        id
    }

    /// IA_NA with the guest's one address, if the guest asks for one.
    fn address_option(&self, asked: &Message) -> Option<DhcpOption> {
        let Some(DhcpOption::IANA(association)) = asked.opts().get(OptionCode::IANA) else {
            return None;
        };
        let address = DhcpOption::IAAddr(IAAddr {
            addr: self.lease.address.addr(),
            preferred_life: INFINITE_LIFETIME,
            valid_life: INFINITE_LIFETIME,
            opts: [].into_iter().collect(),
        });
        Some(DhcpOption::IANA(IANA {
            id: association.id,
            t1: INFINITE_LIFETIME,
            t2: INFINITE_LIFETIME,
            opts: [address].into_iter().collect(),
        }))
    }

    /// Status of a Confirm message: NotOnLink unless all addresses match.
    fn confirm(&self, asked: &Message) -> DhcpOption {
        let right = match asked.opts().get(OptionCode::IANA) {
            Some(DhcpOption::IANA(association)) => association.opts.iter().all(
                |option| !matches!(option, DhcpOption::IAAddr(at) if at.addr != self.lease.address.addr()),
            ),
            _ => true,
        };
        match right {
            true => success(),
            false => status(Status::NotOnLink),
        }
    }

    fn dns_options(&self) -> impl Iterator<Item = DhcpOption> {
        let servers = self.resolver.ipv6.clone();
        let search: Vec<Name> = self
            .resolver
            .search
            .iter()
            .filter_map(|domain| domain.parse().ok())
            .map(|mut name: Name| {
                name.set_fqdn(true);
                name
            })
            .collect();
        let servers = (!servers.is_empty()).then_some(DhcpOption::DomainNameServers(servers));
        let search = (!search.is_empty()).then_some(DhcpOption::DomainSearchList(search));
        servers.into_iter().chain(search)
    }
}

fn success() -> DhcpOption {
    status(Status::Success)
}

fn status(status: Status) -> DhcpOption {
    DhcpOption::StatusCode(StatusCode {
        status,
        msg: String::new(),
    })
}

/// Inserts several options at once.
trait ExtendFrom {
    fn extend_from(&mut self, options: impl IntoIterator<Item = DhcpOption>);
}

impl ExtendFrom for dhcproto::v6::DhcpOptions {
    fn extend_from(&mut self, options: impl IntoIterator<Item = DhcpOption>) {
        options.into_iter().for_each(|option| self.insert(option));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mac::MacAddr;
    use proptest::prelude::*;

    fn server() -> Dhcpv6Responder {
        let lease = Dhcpv6Lease {
            address: "fd10:0:2::2/120".parse().unwrap(),
            server: MacAddr::GATEWAY,
            mtu: 1450,
        };
        Dhcpv6Responder::new(
            lease,
            DnsConfig::parse("nameserver fd00::10\nsearch cluster.local\n"),
        )
    }

    fn ask(kind: MessageType, with: impl IntoIterator<Item = DhcpOption>) -> Vec<u8> {
        let mut message = Message::new_with_id(kind, [1, 2, 3]);
        message.opts_mut().insert(DhcpOption::ClientId(vec![0, 4, 9, 9]));
        message.opts_mut().insert(DhcpOption::IANA(IANA {
            id: 77,
            t1: 0,
            t2: 0,
            opts: [].into_iter().collect(),
        }));
        message.opts_mut().extend_from(with);
        let mut packet = Vec::new();
        message.encode(&mut Encoder::new(&mut packet)).unwrap();
        packet
    }

    fn answered(packet: &[u8]) -> Message {
        Message::decode(&mut Decoder::new(&server().answer(packet).unwrap())).unwrap()
    }

    fn address(message: &Message) -> String {
        match message.opts().get(OptionCode::IANA) {
            Some(DhcpOption::IANA(association)) => match association.opts.get(OptionCode::IAAddr) {
                Some(DhcpOption::IAAddr(at)) => format!("{} {} {}", association.id, at.addr, at.valid_life),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_guest_gets_its_one_address_for_good() {
        let advertised = answered(&ask(MessageType::Solicit, []));
        assert_eq!(advertised.msg_type(), MessageType::Advertise);
        assert_eq!(address(&advertised), format!("77 fd10:0:2::2 {}", u32::MAX));
        let id = advertised.opts().get(OptionCode::ServerId).unwrap().clone();
        for kind in [MessageType::Request, MessageType::Renew] {
            let reply = answered(&ask(kind, [id.clone()]));
            assert_eq!(reply.msg_type(), MessageType::Reply);
            assert_eq!(address(&reply), address(&advertised));
            assert!(reply.opts().get(OptionCode::DomainNameServers).is_some());
        }
        assert_eq!(
            address(&answered(&ask(MessageType::Rebind, []))),
            address(&advertised)
        );
        let rapid = answered(&ask(MessageType::Solicit, [DhcpOption::RapidCommit]));
        assert_eq!(rapid.msg_type(), MessageType::Reply);
    }

    #[test]
    fn messages_to_other_servers_are_ignored() {
        let other = DhcpOption::ServerId(vec![0, 3, 0, 1, 2, 0, 0, 0, 0, 9]);
        assert_eq!(server().answer(&ask(MessageType::Request, [other])), None);
        assert_eq!(server().answer(&ask(MessageType::Request, [])), None);
        assert_eq!(server().answer(&ask(MessageType::Advertise, [])), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_handled(bytes in proptest::collection::vec(any::<u8>(), 0..MAX_PACKET + 10)) {
            let _ = server().answer(&bytes);
        }

        #[test]
        fn corrupted_packets_are_handled(at: proptest::sample::Index, byte: u8, cut: proptest::sample::Index) {
            let mut packet = ask(MessageType::Solicit, [DhcpOption::RapidCommit]);
            let at = at.index(packet.len());
            packet[at] = byte;
            packet.truncate(cut.index(packet.len() + 1));
            let _ = server().answer(&packet);
        }
    }
}
