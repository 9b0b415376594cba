//! Replies without sockets, for fuzz targets.

use super::super::lease::{DhcpLease, Dhcpv6Lease};
use super::super::mac::MacAddr;
use super::options::{DhcpOptions, DnsConfig};
use super::{router_advert, v4, v6};

/// The frame that a DHCPv4 server answers a frame with, and whether it grants the lease. `None` also for options that
/// no server is started with.
pub fn answer_frame(lease: DhcpLease, options: DhcpOptions, frame: &[u8]) -> Option<(Vec<u8>, bool)> {
    options.check().ok()?;
    let server = v4::Dhcpv4Responder::new(lease, options).ok()?;
    super::reply(&server, MacAddr::GATEWAY, frame)
}

/// The answer of a DHCPv6 server to a packet.
pub fn answer_v6(lease: Dhcpv6Lease, resolver: DnsConfig, packet: &[u8]) -> Option<Vec<u8>> {
    let packet = packet.get(..v6::MAX_PACKET).unwrap_or(packet);
    v6::Dhcpv6Responder::new(lease, resolver).answer(packet)
}

/// The router advertisement that answers an ICMPv6 packet, without checksum.
pub fn answer_icmpv6(lease: &Dhcpv6Lease, packet: &[u8]) -> Option<Vec<u8>> {
    router_advert::is_solicitation(packet).then(|| router_advert::advertisement(lease))
}
