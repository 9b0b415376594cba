//! Packets of UDP and TCP by hand, with the checksums that hardware is asked to complete.

use crate::guest::{MAC, PEER};

/// Where transport headers begin without IP options.
const TRANSPORT: usize = 34;

/// An Ethernet frame with IPv4 and `header`, a transport header, before `len` bytes of data. Its checksum, at `offset`
/// in the header, covers only the pseudo header, as it does before hardware is asked to complete it.
fn ipv4(to: [u8; 6], protocol: u8, header: &[u8], offset: usize, len: usize) -> Vec<u8> {
    let (source, target) = ([10, 0, 0, 1], [10, 0, 0, 2]);
    let transport = header.len() + len;
    let mut ip = [
        &[0x45, 0][..],
        &((20 + transport) as u16).to_be_bytes(),
        &[0, 1, 0x40, 0, 64, protocol, 0, 0],
        &source,
        &target,
    ]
    .concat();
    let header_sum = !fold(sum(&ip));
    ip[10..12].copy_from_slice(&header_sum.to_be_bytes());
    let pseudo = [
        &source[..],
        &target,
        &[0, protocol],
        &(transport as u16).to_be_bytes(),
    ]
    .concat();
    let mut frame = [&to[..], &PEER, &[8, 0], &ip, header].concat();
    frame[TRANSPORT + offset..][..2].copy_from_slice(&fold(sum(&pseudo)).to_be_bytes());
    frame.extend((0..len).map(|at| (at >> 7) as u8 ^ at as u8));
    frame
}

fn sum(bytes: &[u8]) -> u32 {
    bytes
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)))
        .sum()
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

pub fn udp(to: [u8; 6], port: u16, len: usize) -> Vec<u8> {
    let length = (8 + len) as u16;
    let header = [
        port.to_be_bytes(),
        5000_u16.to_be_bytes(),
        length.to_be_bytes(),
        [0; 2],
    ]
    .concat();
    ipv4(to, 17, &header, 6, len)
}

pub fn tcp(len: usize) -> Vec<u8> {
    let header = [
        0x13, 0x88, 0x13, 0x89, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0,
    ];
    ipv4(MAC, 6, &header, 16, len)
}

/// True if the checksum of the transport header is complete.
pub fn checksum_is_right(frame: &[u8]) -> bool {
    let transport = &frame[TRANSPORT..];
    let pseudo = [
        &frame[26..34],
        &[0, frame[23]],
        &(transport.len() as u16).to_be_bytes(),
    ]
    .concat();
    fold(sum(&pseudo) + sum(transport)) == 0xffff
}
