//! virtio-net with two queue pairs over sockets in place of a tap.

use std::os::unix::net::UnixDatagram;

use arbitrary::Arbitrary;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::WRITE;
use husk_virtio_net::testing::over;
use husk_virtio_net::{Mac, NetHandle};

use super::{Bench, DATA, Guest, Len, pattern, pieces};

const MAC: Mac = [2, 0, 0, 0, 0, 1];
const PEER: Mac = [2, 0, 0, 0, 0, 2];
const GROUP: Mac = [1, 0, 0x5e, 0, 0, 1];
const HEADER: usize = 12;
/// VIRTIO_NET_F_MQ
const MULTI_QUEUE: u64 = 1 << 22;

#[derive(Arbitrary, Debug)]
pub struct Setup {
    mtu: Option<u16>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum To {
    Own,
    Peer,
    Group,
    All,
    Any(Mac),
}

impl To {
    fn mac(self) -> Mac {
        match self {
            Self::Own => MAC,
            Self::Peer => PEER,
            Self::Group => GROUP,
            Self::All => [0xff; 6],
            Self::Any(mac) => mac,
        }
    }
}

/// An Ethernet frame behind a virtio header.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Frame {
    flags: u8,
    gso: u8,
    /// Length of the headers, size of a segment, start and offset of the checksum.
    sizes: Option<[u16; 4]>,
    to: To,
    vlan: Option<u16>,
    len: u16,
}

impl Frame {
    fn bytes(self) -> Vec<u8> {
        let gso = [0, 1, 4, 5, 0x81, 0x84, self.gso];
        let gso = gso[usize::from(self.gso) % gso.len()];
        let mut bytes = vec![self.flags & 3, gso];
        bytes.extend(
            self.sizes
                .unwrap_or([54, 1448, 34, 16])
                .map(u16::to_le_bytes)
                .concat(),
        );
        bytes.extend([0; 2]);
        bytes.extend([self.to.mac(), PEER].concat());
        if let Some(tag) = self.vlan {
            bytes.extend([0x81, 0]);
            bytes.extend(tag.to_be_bytes());
        }
        bytes.extend([8, 0]);
        bytes.resize(HEADER + usize::from(self.len) % 0x4000, 7);
        bytes
    }
}

/// A command of the control queue.
#[derive(Arbitrary, Debug)]
pub enum Command {
    Mode(u8, bool),
    Tables(Vec<To>, Vec<To>, u8),
    Address(To),
    Vlan(bool, u16),
    Announced,
    Pairs(u8),
    Offloads(u64),
    Any([u8; 16], u8),
}

impl Command {
    fn bytes(&self) -> Vec<u8> {
        let table = |list: &[To], more: u8| {
            let list = &list[..list.len().min(80)];
            let count = (list.len() as u32 + u32::from(more)).to_le_bytes();
            let macs: Vec<Mac> = list.iter().map(|to| to.mac()).collect();
            [&count[..], &macs.concat()].concat()
        };
        match *self {
            Self::Mode(mode, on) => vec![0, mode % 8, on.into()],
            Self::Tables(ref unicast, ref multicast, more) => {
                [&[1, 0][..], &table(unicast, 0), &table(multicast, more % 4)].concat()
            }
            Self::Address(to) => [&[1, 1][..], &to.mac()].concat(),
            Self::Vlan(remove, id) => [&[2, remove.into()][..], &id.to_le_bytes()].concat(),
            Self::Announced => vec![3, 0],
            Self::Pairs(pairs) => vec![4, 0, pairs % 4, 0],
            Self::Offloads(bits) => [&[5, 0][..], &bits.to_le_bytes()].concat(),
            Self::Any(bytes, len) => bytes[..usize::from(len).min(bytes.len())].to_vec(),
        }
    }
}

#[derive(Arbitrary, Debug)]
pub enum Request {
    Command {
        command: Command,
        cut: u8,
        /// Without room for the answer.
        silent: bool,
    },
    Transmit {
        second: bool,
        frame: Frame,
        cut: u8,
        indirect: bool,
    },
    /// Buffers for frames to the driver.
    Offer {
        second: bool,
        count: u8,
        len: Len,
        cut: u8,
    },
    /// A frame from the network.
    Arrive {
        second: bool,
        frame: Frame,
    },
    /// The network takes the frames of the driver.
    Take,
    Link(bool),
    Announce,
}

pub struct NetBench {
    mtu: Option<u16>,
    /// The device's ends, and those of the network.
    taps: Vec<UnixDatagram>,
    peers: Vec<UnixDatagram>,
}

fn take_all(socket: &UnixDatagram) {
    while socket.recv(&mut [0; HEADER]).is_ok() {}
}

impl Bench for NetBench {
    type Setup = Setup;
    type Request = Request;
    type Handle = NetHandle;

    fn new(setup: &Setup) -> Self {
        let (mut taps, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let (tap, peer) = UnixDatagram::pair().expect("sockets");
            peer.set_nonblocking(true).expect("a socket");
            taps.push(tap);
            peers.push(peer);
        }
        let mtu = setup.mtu.map(|mtu| mtu.max(68));
        Self { mtu, taps, peers }
    }

    fn device(&mut self, _: Option<&NetHandle>) -> (Box<dyn VirtioDevice>, NetHandle) {
        let tap = |tap: &UnixDatagram| tap.try_clone().expect("a descriptor").into();
        let taps = self.taps.iter().map(tap).collect();
        let (net, handle) = over(taps, MAC, self.mtu).expect("a device");
        (Box::new(net), handle)
    }

    fn request(&mut self, request: &Request, handle: &NetHandle, guest: &mut Guest) {
        match *request {
            Request::Command {
                ref command,
                cut,
                silent,
            } => {
                let at = guest.slot();
                let bytes = command.bytes();
                guest.put(at, &bytes);
                let mut chain = pieces(at, bytes.len() as u32, cut.into(), 0);
                let answer = (at + 0x3f0, 1, WRITE);
                chain.extend((!silent).then_some(answer));
                let control = if guest.features & MULTI_QUEUE == 0 { 2 } else { 4 };
                guest.add(control, &chain, false);
            }
            Request::Transmit {
                second,
                frame,
                cut,
                indirect,
            } => {
                let at = guest.slot();
                let bytes = frame.bytes();
                guest.put(at, &bytes);
                let chain = pieces(at, bytes.len() as u32, cut.into(), 0);
                guest.add(if second { 3 } else { 1 }, &chain, indirect);
            }
            Request::Offer {
                second,
                count,
                len,
                cut,
            } => {
                for _ in 0..count % 20 {
                    let at = guest.slot();
                    let chain = pieces(at, len.bytes(), cut.into(), WRITE);
                    guest.add(if second { 2 } else { 0 }, &chain, false);
                }
            }
            Request::Arrive { second, frame } => {
                // A tap is full, too, at times.
                let _ = self.peers[usize::from(second)].send(&frame.bytes());
            }
            Request::Take => self.peers.iter().for_each(take_all),
            Request::Link(up) => handle.set_link(up),
            Request::Announce => {
                let _ = handle.announce();
            }
        }
    }

    fn repair(&mut self, handle: &NetHandle) {
        handle.set_link(true);
        self.peers.iter().chain(&self.taps).for_each(take_all);
    }

    fn check(&mut self, handle: &NetHandle, guest: &mut Guest) {
        assert_eq!((handle.mac(), handle.link()), (MAC, true));
        let (received, sent) = (DATA, DATA + 0x1000);
        let frame = [&[0; HEADER][..], &MAC, &PEER, &[8, 0], &pattern(46, 1)].concat();
        guest.drivers[0].add(&[(received, 2048, WRITE)]);
        self.peers[0].send(&frame).expect("room");
        guest.put(sent, &frame);
        guest.drivers[1].add(&[(sent, frame.len() as u32, 0)]);
        let command = guest.slot();
        guest.put(command, &[0, 0, 1, 0xff]);
        guest.serve(4, &[(command, 3, 0), (command + 3, 1, WRITE)]);
        assert_eq!(guest.get(command + 3, 1), [0]);
        assert_eq!(guest.drivers[0].used(), Some((0, frame.len() as u32)));
        assert_eq!(guest.get(received + 12, frame.len() - 12), frame[12..]);
        assert_eq!(guest.drivers[1].used(), Some((0, 0)));
        let mut out = vec![0; 0x100];
        assert_eq!(self.peers[0].recv(&mut out).ok(), Some(frame.len()));
        assert_eq!(out[..frame.len()], frame);
    }
}
