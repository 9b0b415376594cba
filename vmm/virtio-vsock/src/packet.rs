//! The header of a packet (virtio 1.3, section 5.10.6).

/// Bytes of a header.
pub(crate) const HEADER_LEN: usize = 44;
/// CID of the host.
pub(crate) const HOST_CID: u64 = 2;
/// VIRTIO_VSOCK_TYPE_STREAM
pub(crate) const STREAM: u16 = 1;

// Operations: VIRTIO_VSOCK_OP_NAME.
pub(crate) const REQUEST: u16 = 1;
pub(crate) const RESPONSE: u16 = 2;
pub(crate) const RST: u16 = 3;
pub(crate) const SHUTDOWN: u16 = 4;
pub(crate) const RW: u16 = 5;
pub(crate) const CREDIT_UPDATE: u16 = 6;
pub(crate) const CREDIT_REQUEST: u16 = 7;

// Flags of SHUTDOWN: the sender of the packet will receive, or send, no more.
pub(crate) const SHUTDOWN_RCV: u32 = 1;
pub(crate) const SHUTDOWN_SEND: u32 = 2;
pub(crate) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RCV | SHUTDOWN_SEND;

/// `struct virtio_vsock_hdr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    /// Bytes of payload after the header.
    pub len: u32,
    pub kind: u16,
    pub op: u16,
    pub flags: u32,
    /// Size of the sender's receive buffer.
    pub buf_alloc: u32,
    /// Bytes that the sender has taken out of that buffer, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Self {
        Self {
            src_cid: u64::from_le_bytes(field(bytes, 0)),
            dst_cid: u64::from_le_bytes(field(bytes, 8)),
            src_port: u32::from_le_bytes(field(bytes, 16)),
            dst_port: u32::from_le_bytes(field(bytes, 20)),
            len: u32::from_le_bytes(field(bytes, 24)),
            kind: u16::from_le_bytes(field(bytes, 28)),
            op: u16::from_le_bytes(field(bytes, 30)),
            flags: u32::from_le_bytes(field(bytes, 32)),
            buf_alloc: u32::from_le_bytes(field(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(field(bytes, 40)),
        }
    }

    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// The RST that answers this packet.
    pub fn reset(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: RST,
            ..Self::default()
        }
    }
}

/// The bytes of the field at this offset.
fn field<const N: usize>(bytes: &[u8; HEADER_LEN], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

/// A connection, by its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub guest_port: u32,
    pub host_port: u32,
}

impl Key {
    /// The number of its epoll events. The highest guest port, VMADDR_PORT_ANY, is no connection's.
    pub fn token(self) -> u64 {
        u64::from(self.guest_port) << 32 | u64::from(self.host_port)
    }

    pub fn from_token(token: u64) -> Self {
        Self {
            guest_port: (token >> 32) as u32,
            host_port: token as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_header_lies_in_memory_as_the_specification_says() {
        let header = Header {
            src_cid: 3,
            dst_cid: HOST_CID,
            src_port: 0x0102_0304,
            dst_port: 5,
            len: 6,
            kind: STREAM,
            op: RW,
            flags: 7,
            buf_alloc: 8,
            fwd_cnt: 9,
        };
        let mut bytes = [0; HEADER_LEN];
        for (at, value) in [
            (0, 3),
            (8, 2),
            (20, 5),
            (24, 6),
            (28, 1),
            (30, 5),
            (32, 7),
            (36, 8),
            (40, 9),
        ] {
            bytes[at] = value;
        }
        bytes[16..20].copy_from_slice(&[4, 3, 2, 1]);
        assert_eq!(header.to_bytes(), bytes);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_header(bytes in prop::array::uniform32(any::<u8>()), rest in any::<[u8; 12]>()) {
            let bytes: [u8; HEADER_LEN] = [&bytes[..], &rest].concat().try_into().unwrap();
            prop_assert_eq!(Header::from_bytes(&bytes).to_bytes(), bytes);
        }

        #[test]
        fn a_token_is_a_key(token: u64) {
            prop_assert_eq!(Key::from_token(token).token(), token);
        }
    }
}
