//! A transaction of nftables.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkDeserializable, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_netfilter::nftables::{
    ChainAttribute, ChainMessage, Hook, InetHookNumber, NfTablesMessage, RuleAttribute, RuleMessage,
    TableAttribute, TableMessage,
};
use netlink_packet_netfilter::none::ControlMessage;
use netlink_packet_netfilter::{NetfilterHeader, NetfilterMessage, NetfilterProtoFamily};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use rustix::net::sockopt::set_socket_send_buffer_size_force;

use super::expression::Rule;
use crate::error::NetworkFault;

/// A base chain with type, hook and priority, or a regular chain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chain {
    pub(super) name: &'static str,
    hook: Option<(&'static str, u32, i32)>,
}

/// Batches up to this size, in bytes, fit the send buffer that Linux gives sockets by default.
const SEND_BUFFER: usize = 64 << 10;
/// `NLM_F_NONREC`: delete a table only if it is empty.
const IF_EMPTY: u16 = 0x100;

impl Chain {
    /// A base chain that translates addresses at a hook.
    pub(super) const fn base(name: &'static str, hook: libc::c_int, priority: i32) -> Chain {
        Chain {
            name,
            hook: Some(("nat", hook as u32, priority)),
        }
    }

    /// A base chain that filters packets at a hook.
    pub(super) const fn filter(name: &'static str, hook: libc::c_int, priority: i32) -> Chain {
        Chain {
            name,
            hook: Some(("filter", hook as u32, priority)),
        }
    }

    /// A regular chain, which rules jump to.
    pub(super) const fn regular(name: &'static str) -> Chain {
        Chain { name, hook: None }
    }
}

#[derive(Debug)]
pub(super) struct Batch {
    family: NetfilterProtoFamily,
    messages: Vec<(u16, NetfilterMessage)>,
}

impl Batch {
    /// An empty batch for the address's family.
    pub(super) fn new(address: IpAddr) -> Batch {
        let family = match address {
            IpAddr::V4(_) => NetfilterProtoFamily::IPv4,
            IpAddr::V6(_) => NetfilterProtoFamily::IPv6,
        };
        Batch {
            family,
            messages: Vec::new(),
        }
    }

    fn push(&mut self, flags: u16, message: NfTablesMessage) {
        let header = NetfilterHeader::new(self.family, 0, 0);
        self.messages
            .push((flags, NetfilterMessage::new(header, message)));
    }

    pub(super) fn new_table(&mut self, table: &str) {
        self.push(NLM_F_CREATE, NfTablesMessage::NewTable(table_message(table)));
    }

    pub(super) fn new_table_exclusively(&mut self, table: &str) {
        self.push(
            NLM_F_CREATE | NLM_F_EXCL,
            NfTablesMessage::NewTable(table_message(table)),
        );
    }

    pub(super) fn delete_table(&mut self, table: &str) {
        self.push(0, NfTablesMessage::DeleteTable(table_message(table)));
    }

    /// Deletes the table if it is empty; the kernel returns `EBUSY` otherwise.
    pub(super) fn delete_empty_table(&mut self, table: &str) {
        self.push(IF_EMPTY, NfTablesMessage::DeleteTable(table_message(table)));
    }

    /// Adds a chain that must not exist yet: its rules would be another program's.
    pub(super) fn new_chain(&mut self, table: &str, chain: &Chain) {
        let mut message = chain_message(table, chain.name);
        if let Some((kind, hook, priority)) = chain.hook {
            message.attributes.push(ChainAttribute::Type(kind.to_owned()));
            let number: InetHookNumber = hook.into();
            message.attributes.push(ChainAttribute::Hook(vec![
                Hook::Number(number.into()),
                Hook::Priority(priority as _),
            ]));
        }
        self.push(NLM_F_CREATE | NLM_F_EXCL, NfTablesMessage::NewChain(message));
    }

    pub(super) fn delete_chain(&mut self, table: &str, chain: &str) {
        self.push(0, NfTablesMessage::DeleteChain(chain_message(table, chain)));
    }

    pub(super) fn new_rule(&mut self, table: &str, chain: &str, rule: Rule) {
        let mut message = rule_message(table, chain);
        let expressions = rule.expressions.into_iter().map(Into::into).collect();
        message.attributes.push(RuleAttribute::Expressions(expressions));
        self.push(NLM_F_CREATE | NLM_F_APPEND, NfTablesMessage::NewRule(message));
    }

    /// Deletes all rules of a chain.
    pub(super) fn delete_rules(&mut self, table: &str, chain: &str) {
        self.push(0, NfTablesMessage::DeleteRule(rule_message(table, chain)));
    }

    /// Sends the batch. Errors name a missing kernel feature.
    pub(super) fn commit(self, what: impl Into<String>) -> Result<(), NetworkFault> {
        let what = what.into();
        self.send().map_err(|error| refused(what, error))
    }

    /// Sends the batch and waits for the kernel's answer.
    pub(super) fn send(self) -> io::Result<()> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        let last = self.messages.len() as u32;
        let mut bytes = Vec::new();
        let control = |message| {
            let subsystem = libc::NFNL_SUBSYS_NFTABLES as u16;
            NetfilterMessage::new(
                NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, subsystem),
                message,
            )
        };
        emit(&mut bytes, 0, 0, control(ControlMessage::BatchBegin));
        for (number, (flags, message)) in self.messages.into_iter().enumerate() {
            let number = number as u32 + 1;
            // The kernel reports errors of the others too. Acknowledgements of many rules would not fit the socket's
            // receive buffer.
            let flags = if number == last { flags | NLM_F_ACK } else { flags };
            emit(&mut bytes, flags, number, message);
        }
        emit(&mut bytes, 0, last + 1, control(ControlMessage::BatchEnd));
        // A batch is one message, which the kernel refuses if it is larger than the send buffer.
        if bytes.len() > SEND_BUFFER {
            // SAFETY: the socket is open as long as this borrow.
            let socket = unsafe { BorrowedFd::borrow_raw(socket.as_raw_fd()) };
            set_socket_send_buffer_size_force(socket, bytes.len())?;
        }
        socket.send_to(&bytes, &SocketAddr::new(0, 0), 0)?;
        await_answer(&socket)
    }
}

/// Error for a refused batch.
pub(super) fn refused(what: String, error: io::Error) -> NetworkFault {
    let lacking = "the kernel lacks nf_tables: load it (modprobe nf_tables nft_chain_nat nft_masq), or use one with CONFIG_NF_TABLES";
    match error.raw_os_error() {
        Some(libc::EPROTONOSUPPORT | libc::EOPNOTSUPP | libc::EAFNOSUPPORT) => {
            NetworkFault::Host(format!("{what}: {lacking}"))
        }
        _ => NetworkFault::kernel(what)(error),
    }
}

fn emit(bytes: &mut Vec<u8>, flags: u16, number: u32, message: NetfilterMessage) {
    let mut message = NetlinkMessage::from(message);
    message.header.flags = flags | NLM_F_REQUEST;
    message.header.sequence_number = number;
    message.finalize();
    let start = bytes.len();
    bytes.resize(start + message.buffer_len(), 0);
    message.serialize(&mut bytes[start..]);
}

/// Payload of an answer, which is ignored.
#[derive(Debug)]
struct IgnoredMessage;

impl NetlinkDeserializable for IgnoredMessage {
    type Error = std::convert::Infallible;

    fn deserialize(_: &netlink_packet_core::NetlinkHeader, _: &[u8]) -> Result<Self, Self::Error> {
        Ok(IgnoredMessage)
    }
}

/// Returns the first error, or success when the last message is acknowledged.
fn await_answer(socket: &Socket) -> io::Result<()> {
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let message = NetlinkMessage::<IgnoredMessage>::deserialize(rest).map_err(io::Error::other)?;
            if let NetlinkPayload::Error(error) = &message.payload {
                return match error.code {
                    Some(_) => Err(error.to_io()),
                    None => Ok(()),
                };
            }
            let length = (message.header.length as usize).next_multiple_of(4).max(4);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}

fn table_message(table: &str) -> TableMessage {
    TableMessage {
        attributes: vec![TableAttribute::Name(table.to_owned())],
    }
}

fn chain_message(table: &str, chain: &str) -> ChainMessage {
    ChainMessage {
        attributes: vec![
            ChainAttribute::Table(table.to_owned()),
            ChainAttribute::Name(chain.to_owned()),
        ],
    }
}

fn rule_message(table: &str, chain: &str) -> RuleMessage {
    RuleMessage {
        attributes: vec![
            RuleAttribute::Table(table.to_owned()),
            RuleAttribute::Chain(chain.to_owned()),
        ],
    }
}
