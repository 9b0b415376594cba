//! DHCPv4 (RFC 2131) for one guest: computes replies without I/O.

use std::net::Ipv4Addr;

use dhcproto::error::EncodeResult;
use dhcproto::v4::{DhcpOption, Flags, HType, Message, MessageType, Opcode, OptionCode, UnknownOption};
use dhcproto::{Decodable, Decoder, Encodable, Name};

use super::super::error::NetworkFault;
use super::super::lease::DhcpLease;
use super::options::DhcpOptions;
use super::{frame, option_filter};

/// Largest option, in bytes.
const OPTION_MAX: usize = 255;
/// Room for the client identifier that a guest chooses, in bytes. One with a UUID has 23 (RFC 4361).
const CLIENT_ID_ROOM: usize = 32;

#[derive(Debug, Clone)]
pub(super) struct Dhcpv4Responder {
    lease: DhcpLease,
    options: DhcpOptions,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct DhcpReply {
    /// Destination IP address. The Ethernet destination is always the client.
    pub(super) to: Ipv4Addr,
    pub(super) packet: Vec<u8>,
    /// True if this reply grants the lease (DHCPACK).
    pub(super) leases: bool,
}

impl Dhcpv4Responder {
    /// Refuses options that do not fit into one frame: a reply has no fragments.
    pub(super) fn new(lease: DhcpLease, options: DhcpOptions) -> Result<Dhcpv4Responder, NetworkFault> {
        let server = Dhcpv4Responder { lease, options };
        let refused = |reason| NetworkFault::InvalidField {
            field: "dhcpOptions",
            reason,
        };
        let reply = server.full_reply().map_err(|e| refused(e.to_string()))?;
        let mtu = server.lease.mtu as usize;
        let room = mtu.saturating_sub(frame::IP_HEADERS);
        match reply.len() > room {
            true => Err(refused(format!(
                "a DHCP reply takes {} bytes, more than the {room} that the MTU {mtu} leaves: give fewer or shorter options",
                reply.len()
            ))),
            false => Ok(server),
        }
    }

    /// A reply that is as long as one to any common client.
    fn full_reply(&self) -> EncodeResult<Vec<u8>> {
        let none = Ipv4Addr::UNSPECIFIED;
        let mut asked = Message::new_with_id(0, none, none, none, none, &[0; 6]);
        let id = DhcpOption::ClientIdentifier(vec![0; CLIENT_ID_ROOM]);
        asked.opts_mut().insert(id);
        let mut answer = self.reply(&asked, MessageType::Ack);
        self.add_lease(&mut answer, &asked);
        answer.to_vec()
    }

    pub(super) fn lease(&self) -> &DhcpLease {
        &self.lease
    }

    /// Reply to a packet, if it needs one: OFFER to a DISCOVER, ACK to a REQUEST, or NAK if the guest requests another
    /// address. Other messages and other clients get none.
    pub(super) fn answer(&self, packet: &[u8]) -> Option<DhcpReply> {
        let asked = Message::decode(&mut Decoder::new(&option_filter::v4(packet)?)).ok()?;
        // Check the length first: the codec slices the address with it.
        let ours = asked.hlen() == 6
            && asked.opcode() == Opcode::BootRequest
            && asked.htype() == HType::Eth
            && self.lease.client.is_none_or(|client| asked.chaddr() == client.0)
            && asked.giaddr().is_unspecified();
        if !ours {
            return None;
        }
        let kind = match asked.opts().msg_type()? {
            MessageType::Discover => MessageType::Offer,
            MessageType::Request => self.check_request(&asked)?,
            _ => return None,
        };
        let mut answer = self.reply(&asked, kind);
        let to = match kind {
            MessageType::Nak => Ipv4Addr::BROADCAST,
            _ => self.add_lease(&mut answer, &asked),
        };
        let packet = answer.to_vec().ok()?;
        let leases = kind == MessageType::Ack;
        Some(DhcpReply { to, packet, leases })
    }

    /// Type of the reply to a REQUEST; `None` if the request is for another server.
    fn check_request(&self, asked: &Message) -> Option<MessageType> {
        let address = self.lease.address.addr();
        if let Some(DhcpOption::ServerIdentifier(server)) = asked.opts().get(OptionCode::ServerIdentifier)
            && *server != self.lease.server
        {
            return None;
        }
        let wanted = match asked.opts().get(OptionCode::RequestedIpAddress) {
            Some(DhcpOption::RequestedIpAddress(wanted)) => *wanted,
            _ => asked.ciaddr(),
        };
        match wanted == address {
            true => Some(MessageType::Ack),
            false => Some(MessageType::Nak),
        }
    }

    fn reply(&self, asked: &Message, kind: MessageType) -> Message {
        let none = Ipv4Addr::UNSPECIFIED;
        let mut answer = Message::new_with_id(asked.xid(), none, none, none, none, asked.chaddr());
        answer.set_opcode(Opcode::BootReply);
        answer.set_flags(match kind {
            MessageType::Nak => Flags::default().set_broadcast(),
            _ => asked.flags(),
        });
        let options = answer.opts_mut();
        options.insert(DhcpOption::MessageType(kind));
        options.insert(DhcpOption::ServerIdentifier(self.lease.server));
        if let Some(id) = asked.opts().get(OptionCode::ClientIdentifier) {
            options.insert(id.clone());
        }
        answer
    }

    /// Adds the address and all options, requested or not. Returns the destination address of the reply.
    fn add_lease(&self, answer: &mut Message, asked: &Message) -> Ipv4Addr {
        let address = self.lease.address;
        answer.set_yiaddr(address.addr());
        let renewing = !asked.ciaddr().is_unspecified();
        if renewing {
            answer.set_ciaddr(asked.ciaddr());
        }
        for option in self.lease_options() {
            answer.opts_mut().insert(option);
        }
        match (renewing, asked.flags().broadcast()) {
            (true, _) => asked.ciaddr(),
            (false, true) => Ipv4Addr::BROADCAST,
            (false, false) => address.addr(),
        }
    }

    fn lease_options(&self) -> Vec<DhcpOption> {
        let (lease, given) = (&self.lease, &self.options);
        let seconds = u32::try_from(given.lease_time.as_secs()).unwrap_or(u32::MAX);
        let mut options = vec![
            DhcpOption::SubnetMask(lease.address.netmask()),
            DhcpOption::AddressLeaseTime(seconds),
            DhcpOption::Renewal(seconds / 2),
            DhcpOption::Rebinding((u64::from(seconds) * 7 / 8) as u32),
        ];
        options.extend(lease.router.map(|router| DhcpOption::Router(vec![router])));
        options.extend(u16::try_from(lease.mtu).ok().map(DhcpOption::InterfaceMtu));
        options.extend(self.routes());
        let some = |addresses: &[Ipv4Addr]| (!addresses.is_empty()).then(|| addresses.to_vec());
        options.extend(some(&given.resolver.ipv4).map(DhcpOption::DomainNameServer));
        options.extend(some(&given.ntp_servers).map(DhcpOption::NtpServers));
        options.extend(given.hostname.clone().map(DhcpOption::Hostname));
        options.extend(
            given
                .resolver
                .domain()
                .map(|domain| DhcpOption::DomainName(domain.to_owned())),
        );
        let names: Vec<Name> = given
            .resolver
            .search
            .iter()
            .filter_map(|domain| domain.parse().ok())
            .collect();
        options.extend((!names.is_empty()).then_some(DhcpOption::DomainSearch(names)));
        let bytes = |text: &String| text.as_bytes().to_vec();
        options.extend(
            given
                .tftp_server
                .as_ref()
                .map(bytes)
                .map(DhcpOption::TFTPServerName),
        );
        options.extend(given.boot_file.as_ref().map(bytes).map(DhcpOption::BootfileName));
        for (code, value) in &given.private {
            options.push(DhcpOption::Unknown(UnknownOption::new(
                (*code).into(),
                bytes(value),
            )));
        }
        options
    }

    /// As many routes as fit into one option. On-link routes and the default route come first; clients differ in their
    /// handling of split options.
    fn routes(&self) -> Option<DhcpOption> {
        let mut room = OPTION_MAX;
        let fits = |(net, _): &&(ipnet::Ipv4Net, Ipv4Addr)| {
            let size = 5 + usize::from(net.prefix_len().div_ceil(8));
            room = room.saturating_sub(size);
            room > 0
        };
        let on_link = |(_, gateway): &&(ipnet::Ipv4Net, Ipv4Addr)| gateway.is_unspecified();
        let routes = &self.lease.routes;
        let by_importance = routes.iter().rev().filter(|route| !on_link(route));
        let kept: Vec<_> = routes
            .iter()
            .filter(on_link)
            .chain(by_importance)
            .take_while(fits)
            .collect();
        let routes: Vec<_> = routes
            .iter()
            .filter(|route| kept.contains(route))
            .copied()
            .collect();
        (!routes.is_empty()).then_some(DhcpOption::ClasslessStaticRoute(routes))
    }
}

#[cfg(test)]
mod tests;
