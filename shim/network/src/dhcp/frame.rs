//! Ethernet frames that carry DHCPv4 in UDP.

use std::net::Ipv4Addr;

use super::super::mac::MacAddr;

const SERVER_PORT: u16 = 67;
const CLIENT_PORT: u16 = 68;

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
/// Length of the headers that the MTU includes.
pub(super) const IP_HEADERS: usize = IPV4 + UDP;
const ETHERTYPE_IPV4: [u8; 2] = [8, 0];
const PROTOCOL_UDP: u8 = 17;

/// Source address and UDP payload of a frame to a DHCP server; `None` for other frames. Checksums are not verified: a
/// guest may leave them to a device that never sees the frame.
pub(super) fn to_server(frame: &[u8]) -> Option<(MacAddr, &[u8])> {
    let (ethernet, rest) = frame.split_at_checked(ETHERNET)?;
    if ethernet[12..14] != ETHERTYPE_IPV4 {
        return None;
    }
    let source = MacAddr::from_slice(&ethernet[6..12])?;
    let first = *rest.first()?;
    let header = usize::from(first & 0xf) * 4;
    let length = usize::from(u16::from_be_bytes([*rest.get(2)?, *rest.get(3)?]));
    // Bytes after the IP packet are padding.
    let (ip, udp) = rest.get(..length)?.split_at_checked(header)?;
    let fragmented = u16::from_be_bytes([*ip.get(6)?, *ip.get(7)?]) & 0x3fff != 0;
    if first >> 4 != 4 || header < IPV4 || fragmented || *ip.get(9)? != PROTOCOL_UDP {
        return None;
    }
    let length = usize::from(u16::from_be_bytes([*udp.get(4)?, *udp.get(5)?]));
    if u16::from_be_bytes([*udp.get(2)?, *udp.get(3)?]) != SERVER_PORT {
        return None;
    }
    Some((source, udp.get(UDP..length)?))
}

/// Builds the frame of a reply; `None` if it is longer than an IP packet can be.
pub(super) fn to_client(
    (from_mac, from): (MacAddr, Ipv4Addr),
    (to_mac, to): (MacAddr, Ipv4Addr),
    payload: &[u8],
) -> Option<Vec<u8>> {
    let total = u16::try_from(IPV4 + UDP + payload.len()).ok()?;
    let mut ip = [0; IPV4];
    ip[0] = 0x45;
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    ip[8] = 64;
    ip[9] = PROTOCOL_UDP;
    ip[12..16].copy_from_slice(&from.octets());
    ip[16..20].copy_from_slice(&to.octets());
    let sum = checksum([&ip[..]]);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());

    let length = total - IPV4 as u16;
    let mut udp = [0; UDP];
    udp[..2].copy_from_slice(&SERVER_PORT.to_be_bytes());
    udp[2..4].copy_from_slice(&CLIENT_PORT.to_be_bytes());
    udp[4..6].copy_from_slice(&length.to_be_bytes());
    let [high, low] = length.to_be_bytes();
    let pseudo = [0, PROTOCOL_UDP, high, low];
    let sum = match checksum([&ip[12..20], &pseudo, &udp, payload]) {
        // Zero means no checksum.
        0 => 0xffff,
        sum => sum,
    };
    udp[6..8].copy_from_slice(&sum.to_be_bytes());

    Some([&to_mac.0[..], &from_mac.0, &ETHERTYPE_IPV4, &ip, &udp, payload].concat())
}

/// Internet checksum (RFC 1071) of parts of which only the last may have an odd length.
fn checksum<const N: usize>(parts: [&[u8]; N]) -> u16 {
    let mut sum = 0u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GUEST: MacAddr = MacAddr([2, 0, 0, 0, 0, 5]);

    /// A request differs from a reply in its ports only, as far as the parser looks.
    fn request(payload: &[u8]) -> Vec<u8> {
        let any = Ipv4Addr::UNSPECIFIED;
        let to = (MacAddr([0xff; 6]), Ipv4Addr::BROADCAST);
        let mut frame = to_client((GUEST, any), to, payload).unwrap();
        frame[ETHERNET + IPV4 + 2..][..2].copy_from_slice(&SERVER_PORT.to_be_bytes());
        frame
    }

    #[test]
    fn a_request_is_found_and_its_padding_left() {
        let mut frame = request(b"hello");
        frame.extend([0; 20]);
        assert_eq!(to_server(&frame), Some((GUEST, &b"hello"[..])));
    }

    #[test]
    fn replies_and_fragments_are_ignored() {
        let to = (GUEST, Ipv4Addr::new(10, 0, 2, 2));
        let answer = to_client((MacAddr::GATEWAY, Ipv4Addr::new(10, 0, 2, 1)), to, b"hello").unwrap();
        assert_eq!(to_server(&answer), None);
        let mut fragment = request(b"hello");
        fragment[ETHERNET + 6] = 0x20;
        assert_eq!(to_server(&fragment), None);
    }

    #[test]
    fn ip_and_udp_checksums_match() {
        let to = (GUEST, Ipv4Addr::new(10, 0, 2, 2));
        let frame = to_client((MacAddr::GATEWAY, Ipv4Addr::new(10, 0, 2, 1)), to, b"odd").unwrap();
        let ip = &frame[ETHERNET..ETHERNET + IPV4];
        assert_eq!(checksum([ip]), 0);
        let length = (frame.len() - ETHERNET - IPV4) as u16;
        let pseudo = [[0, PROTOCOL_UDP], length.to_be_bytes()].concat();
        assert_eq!(checksum([&ip[12..20], &pseudo, &frame[ETHERNET + IPV4..]]), 0);
    }

    proptest! {
        #[test]
        fn any_bytes_are_handled(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = to_server(&bytes);
        }

        #[test]
        fn corrupted_frames_are_handled(at in 0..300usize, byte: u8, cut in 0..300usize) {
            let mut frame = request(&[7; 240]);
            let at = at.min(frame.len() - 1);
            frame[at] = byte;
            frame.truncate(cut);
            let _ = to_server(&frame);
        }
    }
}
