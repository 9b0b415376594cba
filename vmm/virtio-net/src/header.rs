//! The header before each frame (virtio 1.2, section 5.1.6) and the frame's first bytes.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_USO, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_NONE,
    VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6, VIRTIO_NET_HDR_GSO_UDP_L4,
};

/// Bytes of `struct virtio_net_hdr` as virtio 1.0 and later have it, with `num_buffers`.
pub(crate) const HEADER_LEN: usize = 12;

/// Offset of `num_buffers` in the header.
pub(crate) const NUM_BUFFERS_OFFSET: usize = 10;

/// Bytes of an Ethernet header.
pub(crate) const ETHERNET_LEN: usize = 14;

/// Bytes of an 802.1Q tag.
pub(crate) const VLAN_LEN: usize = 4;

/// The longest frame: an IPv6 header and 64 KiB behind two VLAN tags.
pub(crate) const MAX_FRAME: usize = ETHERNET_LEN + 2 * VLAN_LEN + 40 + 65_535;

/// Errors of a frame that the driver sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("frame shorter than its headers")]
    Short,
    #[error("frame longer than a tap accepts")]
    Long,
    #[error("device-writable descriptor in a transmit chain")]
    Writable,
    #[error("buffer outside of guest memory, or in too many pieces")]
    Buffers,
    #[error("an offload that was not negotiated")]
    Offload,
    #[error("a checksum outside of the frame")]
    Checksum,
    #[error("segments without a size or a checksum")]
    Segments,
}

/// A header from the driver, untrusted until [`Header::admit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub flags: u8,
    pub gso_type: u8,
    pub hdr_len: u16,
    pub gso_size: u16,
    pub csum_start: u16,
    pub csum_offset: u16,
}

impl Header {
    pub fn parse(bytes: [u8; HEADER_LEN]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    /// The header in the layout of the tap.
    pub fn bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [self.flags, self.gso_type, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let words = [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset];
        for (place, word) in bytes[2..].chunks_exact_mut(2).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Checks the header of a frame of `len` bytes against the negotiated `features` and returns the header for the
    /// tap (section 5.1.6.2). Fields that the driver may not set are cleared.
    ///
    /// # Errors
    /// The frame is too short or too long, or the header asks for an offload that is not negotiated or not valid.
    pub fn admit(self, features: u64, len: usize) -> Result<Self, FrameError> {
        if len < ETHERNET_LEN {
            return Err(FrameError::Short);
        }
        if len > MAX_FRAME {
            return Err(FrameError::Long);
        }
        let has = |bit: u32| features & 1 << bit != 0;
        let checksum = u32::from(self.flags) & VIRTIO_NET_HDR_F_NEEDS_CSUM != 0;
        let kind = u32::from(self.gso_type) & !VIRTIO_NET_HDR_GSO_ECN;
        let ecn = u32::from(self.gso_type) & VIRTIO_NET_HDR_GSO_ECN != 0;
        let tcp = matches!(kind, VIRTIO_NET_HDR_GSO_TCPV4 | VIRTIO_NET_HDR_GSO_TCPV6);
        let negotiated = match kind {
            VIRTIO_NET_HDR_GSO_NONE => true,
            VIRTIO_NET_HDR_GSO_TCPV4 => has(VIRTIO_NET_F_HOST_TSO4),
            VIRTIO_NET_HDR_GSO_TCPV6 => has(VIRTIO_NET_F_HOST_TSO6),
            VIRTIO_NET_HDR_GSO_UDP_L4 => has(VIRTIO_NET_F_HOST_USO),
            _ => false,
        };
        if !negotiated || checksum && !has(VIRTIO_NET_F_CSUM) || ecn && !(tcp && has(VIRTIO_NET_F_HOST_ECN)) {
            return Err(FrameError::Offload);
        }
        // The checksum is two bytes, which must lie in the frame.
        if checksum && usize::from(self.csum_start) + usize::from(self.csum_offset) + 2 > len {
            return Err(FrameError::Checksum);
        }
        let segmented = kind != VIRTIO_NET_HDR_GSO_NONE;
        if segmented && (self.gso_size == 0 || !checksum) {
            return Err(FrameError::Segments);
        }
        Ok(Self {
            flags: if checksum {
                VIRTIO_NET_HDR_F_NEEDS_CSUM as u8
            } else {
                0
            },
            gso_type: self.gso_type,
            // A hint (section 5.1.6.2.2). The tap rejects one that is longer than the frame.
            hdr_len: if segmented {
                self.hdr_len.min(u16::try_from(len).unwrap_or(u16::MAX))
            } else {
                0
            },
            gso_size: if segmented { self.gso_size } else { 0 },
            csum_start: if checksum { self.csum_start } else { 0 },
            csum_offset: if checksum { self.csum_offset } else { 0 },
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: u64 = 1 << VIRTIO_NET_F_CSUM
        | 1 << VIRTIO_NET_F_HOST_TSO4
        | 1 << VIRTIO_NET_F_HOST_TSO6
        | 1 << VIRTIO_NET_F_HOST_ECN
        | 1 << VIRTIO_NET_F_HOST_USO;

    fn header(flags: u8, gso_type: u8, gso_size: u16) -> Header {
        Header {
            flags,
            gso_type,
            hdr_len: 54,
            gso_size,
            csum_start: 34,
            csum_offset: 16,
        }
    }

    #[test]
    fn each_offload_needs_its_feature() {
        for (kind, bit) in [
            (1, VIRTIO_NET_F_HOST_TSO4),
            (4, VIRTIO_NET_F_HOST_TSO6),
            (5, VIRTIO_NET_F_HOST_USO),
            (0x81, VIRTIO_NET_F_HOST_ECN),
        ] {
            assert_eq!(header(1, kind, 1448).admit(ALL, 9000), Ok(header(1, kind, 1448)));
            assert_eq!(
                header(1, kind, 1448).admit(ALL & !(1 << bit), 9000),
                Err(FrameError::Offload)
            );
        }
        assert_eq!(header(1, 0, 0).admit(ALL & !1, 9000), Err(FrameError::Offload));
        for unknown in [2, 3, 6, 0x7f, 0x80, 0x85] {
            assert_eq!(
                header(1, unknown, 1448).admit(ALL, 9000),
                Err(FrameError::Offload)
            );
        }
    }

    #[test]
    fn invalid_headers_are_refused() {
        assert_eq!(header(0, 1, 1448).admit(ALL, 9000), Err(FrameError::Segments));
        assert_eq!(header(1, 1, 0).admit(ALL, 9000), Err(FrameError::Segments));
        assert_eq!(header(1, 0, 0).admit(ALL, 51), Err(FrameError::Checksum));
        assert!(header(1, 0, 0).admit(ALL, 52).is_ok());
        assert_eq!(header(0, 0, 0).admit(ALL, 13), Err(FrameError::Short));
        assert_eq!(header(0, 0, 0).admit(ALL, MAX_FRAME + 1), Err(FrameError::Long));
    }

    #[test]
    fn fields_that_the_driver_may_not_set_are_cleared() {
        let plain = header(0xfe, 0, 7).admit(ALL, 60).unwrap();
        assert_eq!(plain.bytes(), [0; HEADER_LEN]);
        assert_eq!(header(1, 1, 8).admit(ALL, 53).unwrap().hdr_len, 53);
    }

    proptest! {
        #[test]
        fn whatever_is_admitted_lies_in_the_frame(
            bytes: [u8; HEADER_LEN], features: u64, len in 0..2 * MAX_FRAME
        ) {
            if let Ok(admitted) = Header::parse(bytes).admit(features, len) {
                let end = usize::from(admitted.csum_start) + usize::from(admitted.csum_offset);
                prop_assert!(admitted.flags == 0 || end + 2 <= len);
                prop_assert!(usize::from(admitted.hdr_len) <= len);
                prop_assert_eq!(Header::parse(admitted.bytes()), admitted);
                prop_assert_eq!(admitted.admit(features, len), Ok(admitted));
            }
        }
    }
}
