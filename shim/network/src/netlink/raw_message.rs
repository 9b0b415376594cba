//! rtnetlink messages as raw bytes, so that everything the kernel reported can be sent back.

use std::io;

use netlink_packet_core::{
    DefaultNla, Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable, Nla, NlasIterator, Parseable,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// Message after the netlink header: the header of its type, and attributes.
#[derive(Debug, Clone)]
struct RawMessage {
    kind: u16,
    bytes: Vec<u8>,
}

impl NetlinkSerializable for RawMessage {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.bytes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.bytes);
    }
}

impl NetlinkDeserializable for RawMessage {
    type Error = std::convert::Infallible;

    fn deserialize(header: &NetlinkHeader, bytes: &[u8]) -> Result<Self, Self::Error> {
        Ok(RawMessage {
            kind: header.message_type,
            bytes: bytes.to_vec(),
        })
    }
}

/// Dumps all objects of a type (`RTM_GETROUTE`, …) in the calling thread's namespace.
pub(super) fn dump(kind: u16, ask: Vec<u8>) -> io::Result<Vec<Vec<u8>>> {
    exchange(kind, NLM_F_DUMP, ask)
}

/// Sends a request and waits for its acknowledgement.
pub(super) fn request(kind: u16, flags: u16, bytes: Vec<u8>) -> io::Result<()> {
    exchange(kind, flags | NLM_F_ACK, bytes).map(drop)
}

fn exchange(kind: u16, flags: u16, bytes: Vec<u8>) -> io::Result<Vec<Vec<u8>>> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    let body = RawMessage { kind, bytes };
    let mut message = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::InnerMessage(body));
    message.header.flags = flags | NLM_F_REQUEST;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send_to(&bytes, &SocketAddr::new(0, 0), 0)?;
    let mut found = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let message = NetlinkMessage::<RawMessage>::deserialize(rest).map_err(io::Error::other)?;
            match message.payload {
                NetlinkPayload::InnerMessage(body) => found.push(body.bytes),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                NetlinkPayload::Error(_) | NetlinkPayload::Done(_) => return Ok(found),
                _ => {}
            }
            let length = (message.header.length as usize).next_multiple_of(4).max(4);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}

/// A message split into header and attributes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ParsedMessage {
    pub(super) header: Vec<u8>,
    pub(super) attributes: Vec<DefaultNla>,
}

impl ParsedMessage {
    /// `None` if the message is malformed.
    pub(super) fn of(message: &[u8], header: usize) -> Option<ParsedMessage> {
        let (header, attributes) = message.split_at_checked(header)?;
        let attributes = NlasIterator::new(attributes).map(|found| DefaultNla::parse(&found.ok()?).ok());
        Some(ParsedMessage {
            header: header.to_vec(),
            attributes: attributes.collect::<Option<_>>()?,
        })
    }

    /// Serialises the message.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let attributes = self.attributes.as_slice();
        let mut bytes = self.header.clone();
        bytes.resize(self.header.len() + attributes.buffer_len(), 0);
        attributes.emit(&mut bytes[self.header.len()..]);
        bytes
    }

    /// Value of the attribute of this type.
    pub(super) fn value(&self, kind: u16) -> Option<Vec<u8>> {
        self.attributes.iter().find(|nla| kind_of(nla) == kind).map(value)
    }

    /// Value of a 32-bit attribute.
    pub(super) fn number(&self, kind: u16) -> Option<u32> {
        Some(u32::from_ne_bytes(self.value(kind)?.try_into().ok()?))
    }

    pub(super) fn remove(&mut self, kinds: &[u16]) {
        self.attributes.retain(|nla| !kinds.contains(&kind_of(nla)));
    }

    pub(super) fn set(&mut self, kind: u16, value: Vec<u8>) {
        self.remove(&[kind]);
        self.attributes.push(DefaultNla::new(kind, value));
    }
}

/// Attribute type without flags.
fn kind_of(nla: &DefaultNla) -> u16 {
    nla.kind() & netlink_packet_core::NLA_TYPE_MASK
}

fn value(nla: &DefaultNla) -> Vec<u8> {
    let mut value = vec![0; nla.value_len()];
    nla.emit_value(&mut value);
    value
}
