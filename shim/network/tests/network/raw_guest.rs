//! A minimal guest at the tap: ARP, ICMP echo and UDP.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use husk_network::{MacAddr, PreparedNic};

/// Length of virtio's header before each frame.
const HEADER: usize = 12;
/// Limit for an answer on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// Time to wait for something that must not arrive.
pub const QUIET: Duration = Duration::from_millis(700);

const BROADCAST: MacAddr = MacAddr([0xff; 6]);

pub struct RawGuest {
    tap: File,
    pub mac: MacAddr,
    /// Its address, for which it answers ARP.
    pub ip: Option<Ipv4Addr>,
}

impl RawGuest {
    pub fn of(prepared: &PreparedNic) -> RawGuest {
        RawGuest {
            tap: prepared.taps[0].try_clone().unwrap().into(),
            mac: prepared.mac,
            ip: None,
        }
    }

    pub fn send(&mut self, frame: &[u8]) {
        let bytes = [&[0; HEADER][..], frame].concat();
        assert_eq!(self.tap.write(&bytes).unwrap(), bytes.len());
    }

    /// The first frame for which `wanted` returns a value.
    pub fn expect<T>(&mut self, limit: Duration, wanted: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
        let end = Instant::now() + limit;
        let mut buffer = vec![0; 70_000];
        while Instant::now() < end {
            match self.tap.read(&mut buffer) {
                Ok(length) => {
                    let frame = buffer[HEADER.min(length)..length].to_vec();
                    if let Some(found) = wanted(&frame) {
                        return Some(found);
                    }
                    self.answer_arp(&frame);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(2)),
                Err(e) => panic!("the tap: {e}"),
            }
        }
        None
    }

    fn answer_arp(&mut self, frame: &[u8]) {
        let Some(ip) = self.ip else { return };
        if frame.get(12..14) == Some(&[8, 6])
            && frame.get(20..22) == Some(&[0, 1])
            && frame.get(38..42) == Some(&ip.octets())
        {
            let asker = MacAddr::from_slice(&frame[22..28]).unwrap();
            let asker_ip: [u8; 4] = frame[28..32].try_into().unwrap();
            let answer = arp(2, (self.mac, ip), (asker, asker_ip.into()));
            self.send(&ethernet(asker, self.mac, 0x0806, &answer));
        }
    }

    /// Sends a frame repeatedly and waits for an answer: a bridge drops frames until its port forwards.
    fn ask<T>(&mut self, frame: &[u8], limit: Duration, wanted: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            self.send(frame);
            let found = self.expect(QUIET.min(limit), &wanted);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Resolves an address by ARP.
    pub fn resolve(&mut self, target: Ipv4Addr, limit: Duration) -> Option<MacAddr> {
        let own = self.ip.unwrap_or(Ipv4Addr::UNSPECIFIED);
        let request = arp(1, (self.mac, own), (MacAddr([0; 6]), target));
        let request = ethernet(BROADCAST, self.mac, 0x0806, &request);
        self.ask(&request, limit, |frame| {
            let reply = frame.get(12..14)? == [8, 6]
                && frame.get(20..22)? == [0, 2]
                && frame.get(28..32)? == target.octets();
            reply.then(|| MacAddr::from_slice(&frame[22..28])).flatten()
        })
    }

    /// True if an echo reply from `to` arrives through the station `by`.
    pub fn pings(&mut self, to: Ipv4Addr, by: MacAddr) -> bool {
        let mut echo = vec![8, 0, 0, 0, 0x12, 0x34, 0, 1];
        echo.extend(b"payload!");
        let sum = checksum(&echo);
        echo[2..4].copy_from_slice(&sum.to_be_bytes());
        let packet = ipv4(1, self.ip.unwrap(), to, &echo);
        let packet = ethernet(by, self.mac, 0x0800, &packet);
        let own = self.ip.unwrap();
        let answered = self.ask(&packet, TIMEOUT, |frame| {
            let echo = frame.get(23)? == &1 && frame.get(34)? == &0 && frame.get(38..40)? == [0x12, 0x34];
            (echo && frame.get(26..30)? == to.octets() && frame.get(30..34)? == own.octets()).then_some(())
        });
        answered.is_some()
    }

    pub fn send_udp(&mut self, (by, to, port): (MacAddr, Ipv4Addr, u16), from_port: u16, payload: &[u8]) {
        let from = self.ip.unwrap_or(Ipv4Addr::UNSPECIFIED);
        let udp = udp(from_port, port, payload);
        self.send(&ethernet(by, self.mac, 0x0800, &ipv4(17, from, to, &udp)));
    }

    /// Waits for a UDP packet to a port. Returns its source and payload.
    pub fn receive_udp(&mut self, port: u16, limit: Duration) -> Option<(Ipv4Addr, Vec<u8>)> {
        self.expect(limit, |frame| {
            let udp = frame.get(12..14)? == [8, 0]
                && frame.get(23)? == &17
                && frame.get(36..38)? == port.to_be_bytes();
            let from: [u8; 4] = frame.get(26..30)?.try_into().ok()?;
            udp.then(|| (from.into(), frame[42..].to_vec()))
        })
    }
}

pub fn ethernet(to: MacAddr, from: MacAddr, kind: u16, payload: &[u8]) -> Vec<u8> {
    [&to.0[..], &from.0, &kind.to_be_bytes(), payload].concat()
}

fn arp(operation: u8, from: (MacAddr, Ipv4Addr), to: (MacAddr, Ipv4Addr)) -> Vec<u8> {
    let head = [0, 1, 8, 0, 6, 4, 0, operation];
    [&head[..], &from.0.0, &from.1.octets(), &to.0.0, &to.1.octets()].concat()
}

fn ipv4(protocol: u8, from: Ipv4Addr, to: Ipv4Addr, payload: &[u8]) -> Vec<u8> {
    let mut header = vec![0x45, 0];
    header.extend((20 + payload.len() as u16).to_be_bytes());
    header.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    header.extend(payload);
    header
}

/// Without a checksum, which UDP allows.
fn udp(from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
    let length = 8 + payload.len() as u16;
    [
        &from.to_be_bytes()[..],
        &to.to_be_bytes(),
        &length.to_be_bytes(),
        &[0, 0],
        payload,
    ]
    .concat()
}

pub fn checksum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
