//! Router advertisements (RFC 4861, section 4.2): the guest's gateway, with addresses from DHCPv6.

use super::super::lease::Dhcpv6Lease;

const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;

/// Managed and other configuration flags: addresses and DNS come from DHCPv6.
const FLAGS: u8 = 0xc0;
/// Router lifetime, in seconds.
const LIFETIME: u16 = 9000;
/// Interval of unsolicited advertisements, well within the lifetime.
pub(super) const ADVERT_INTERVAL: std::time::Duration = std::time::Duration::from_secs(600);

/// True for a router solicitation.
pub(super) fn is_solicitation(packet: &[u8]) -> bool {
    packet.len() >= 8 && packet[..2] == [ROUTER_SOLICITATION, 0]
}

/// An advertisement without checksum, which the kernel adds.
pub(super) fn advertisement(lease: &Dhcpv6Lease) -> Vec<u8> {
    let mut packet = vec![ROUTER_ADVERTISEMENT, 0, 0, 0, 64, FLAGS];
    packet.extend(LIFETIME.to_be_bytes());
    packet.extend([0; 8]);
    // Source link-layer address option.
    packet.extend([1, 1]);
    packet.extend(lease.server.0);
    // MTU option.
    packet.extend([5, 1, 0, 0]);
    packet.extend(lease.mtu.to_be_bytes());
    // Prefix information option: on-link, infinite lifetimes, not for address autoconfiguration.
    packet.extend([3, 4, lease.address.prefix_len(), 0x80]);
    packet.extend([0xff; 8]);
    packet.extend([0; 4]);
    packet.extend(lease.address.network().octets());
    packet
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mac::MacAddr;

    #[test]
    fn as_the_rfc_lays_it_out() {
        let packet = advertisement(&Dhcpv6Lease {
            address: "fd10:0:2::2/120".parse().unwrap(),
            server: MacAddr::GATEWAY,
            mtu: 1450,
        });
        assert_eq!(packet.len(), 16 + 8 + 8 + 32);
        assert_eq!(packet[5], 0xc0);
        assert_eq!(packet[28..32], 1450u32.to_be_bytes());
        assert_eq!(packet[34..36], [120, 0x80]);
        assert_eq!(
            packet[48..64],
            "fd10:0:2::".parse::<std::net::Ipv6Addr>().unwrap().octets()
        );
    }

    #[test]
    fn only_solicitations_are_answered() {
        assert!(is_solicitation(&[133, 0, 0, 0, 0, 0, 0, 0]));
        assert!(!is_solicitation(&[133, 0, 0, 0]));
        assert!(!is_solicitation(&[134, 0, 0, 0, 0, 0, 0, 0]));
    }
}
