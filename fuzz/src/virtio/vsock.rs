//! virtio-vsock.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use arbitrary::Arbitrary;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::WRITE;
use husk_virtio_vsock::{Vsock, VsockHandle};

use super::{Bench, Guest, Len, pattern, pieces};

const CID: u64 = 3;
const HOST_CID: u64 = 2;
const HEADER: usize = 44;

const REQUEST: u16 = 1;
const RESPONSE: u16 = 2;
const RW: u16 = 5;

/// Most sockets that the host keeps, and requests of the guest that it keeps waiting.
const HOSTS: usize = 8;

/// A port of the host.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Port {
    Known(u8),
    /// One of those that the device gives to connections of the host.
    Given(u8),
    Any(u32),
}

#[derive(Arbitrary, Debug)]
pub enum Request {
    Packet {
        guest_port: u8,
        host_port: Port,
        op: u8,
        flags: u8,
        credit: Option<(u32, u32)>,
        /// Bytes of payload, and another number of them that the header tells.
        len: u16,
        told: Option<u32>,
        /// Another source, destination or type.
        stray: Option<(u8, u8, u8)>,
        cut: u8,
    },
    Offer {
        count: u8,
        len: Len,
    },
    EventBuffer(u8),
    /// The host answers the guest's first request.
    Answer(bool),
    Connect(u8),
    Host {
        number: u8,
        act: HostAct,
    },
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum HostAct {
    Send(u16),
    Read,
    ShutDown(bool),
    Close,
}

/// A packet of the guest.
struct Packet {
    ports: (u32, u32),
    op: u16,
    len: u32,
    flags: u32,
    credit: (u32, u32),
    cids: (u64, u64),
    kind: u16,
}

impl Packet {
    fn new(ports: (u32, u32), op: u16, len: u32) -> Self {
        Self {
            ports,
            op,
            len,
            flags: 0,
            credit: (0x1_0000, 0),
            cids: (CID, HOST_CID),
            kind: 1,
        }
    }

    fn header(&self) -> Vec<u8> {
        let mut bytes = [self.cids.0, self.cids.1].map(u64::to_le_bytes).concat();
        bytes.extend(
            [self.ports.0, self.ports.1, self.len]
                .map(u32::to_le_bytes)
                .concat(),
        );
        bytes.extend([self.kind, self.op].map(u16::to_le_bytes).concat());
        bytes.extend(
            [self.flags, self.credit.0, self.credit.1]
                .map(u32::to_le_bytes)
                .concat(),
        );
        bytes
    }
}

pub struct VsockBench {
    /// Numbers of the guest's requests.
    asked: Arc<Mutex<Vec<u64>>>,
    hosts: Vec<UnixStream>,
}

impl VsockBench {
    /// A socket for the device, whose other end the host keeps.
    fn socket(&mut self) -> UnixStream {
        let (host, stream) = UnixStream::pair().expect("sockets");
        host.set_nonblocking(true).expect("a socket");
        self.hosts.truncate(HOSTS - 1);
        self.hosts.insert(0, host);
        stream
    }

    fn answer(&mut self, accept: bool, handle: &VsockHandle) {
        let asked = self.asked.lock().expect("no panic").pop();
        if let Some(id) = asked {
            let stream = accept.then(|| self.socket().into());
            let _ = handle.answer(id, stream);
        }
    }

    fn host(&mut self, number: u8, act: HostAct) {
        let number = usize::from(number) % HOSTS;
        let Some(host) = self.hosts.get_mut(number) else {
            return;
        };
        match act {
            HostAct::Send(len) => drop(host.write(&pattern(len.into(), 1))),
            HostAct::Read => while host.read(&mut [0; 0x1000]).is_ok_and(|count| count > 0) {},
            HostAct::ShutDown(write) => {
                let _ = host.shutdown(if write { Shutdown::Write } else { Shutdown::Read });
            }
            HostAct::Close => drop(self.hosts.remove(number)),
        }
    }

    /// Sends a packet of a new driver.
    fn send(guest: &mut Guest, packet: &Packet, payload: &[u8]) {
        let at = guest.slot();
        guest.put(at, &[&packet.header(), payload].concat());
        guest.serve(1, &[(at, (HEADER + payload.len()) as u32, 0)]);
    }
}

impl Bench for VsockBench {
    type Setup = ();
    type Request = Request;
    type Handle = VsockHandle;

    fn new((): &()) -> Self {
        Self {
            asked: Arc::default(),
            hosts: Vec::new(),
        }
    }

    fn device(&mut self, _: Option<&VsockHandle>) -> (Box<dyn VirtioDevice>, VsockHandle) {
        let asked = Arc::clone(&self.asked);
        let on_request = move |id, _| {
            let mut asked = asked.lock().expect("no panic");
            let room = asked.len() < HOSTS;
            if room {
                asked.push(id);
            }
            room
        };
        let (vsock, handle) = Vsock::new(CID as u32, Arc::new(on_request)).expect("a device");
        (Box::new(vsock), handle)
    }

    fn request(&mut self, request: &Request, handle: &VsockHandle, guest: &mut Guest) {
        match *request {
            Request::Packet {
                guest_port,
                host_port,
                op,
                flags,
                credit,
                len,
                told,
                stray,
                cut,
            } => {
                let host_port = match host_port {
                    Port::Known(port) => u32::from(port % 4),
                    Port::Given(port) => (1 << 30) + u32::from(port % 4),
                    Port::Any(port) => port,
                };
                let ports = (u32::from(guest_port % 4), host_port);
                let len = u32::from(len) % 0x8000;
                let mut packet = Packet::new(ports, u16::from(op % 10), told.unwrap_or(len));
                packet.flags = flags.into();
                packet.credit = credit.unwrap_or(packet.credit);
                if let Some((source, destination, kind)) = stray {
                    packet.cids = (source.into(), destination.into());
                    packet.kind = kind.into();
                }
                let at = guest.slot();
                guest.put(at, &packet.header());
                guest.add(1, &pieces(at, HEADER as u32 + len, cut.into(), 0), false);
            }
            Request::Offer { count, len } => {
                for _ in 0..count % 16 {
                    let at = guest.slot();
                    guest.add(0, &[(at, len.bytes(), WRITE)], false);
                }
            }
            Request::EventBuffer(len) => {
                let at = guest.slot();
                guest.add(2, &[(at, u32::from(len % 8), WRITE)], false);
            }
            Request::Answer(accept) => self.answer(accept, handle),
            Request::Connect(port) => {
                let stream = self.socket();
                let _ = handle.connect(u32::from(port % 4), stream.into());
            }
            Request::Host { number, act } => self.host(number, act),
        }
    }

    fn repair(&mut self, _: &VsockHandle) {
        self.asked.lock().expect("no panic").clear();
    }

    fn check(&mut self, handle: &VsockHandle, guest: &mut Guest) {
        let ports = (77, 78);
        let received = guest.slot();
        guest.drivers[0].add(&[(received, 256, WRITE)]);
        Self::send(guest, &Packet::new(ports, REQUEST, 0), &[]);
        self.answer(true, handle);
        guest.run();
        assert_eq!(guest.drivers[0].used(), Some((0, HEADER as u32)));
        let response = guest.get(received, HEADER);
        assert_eq!(response[30..32], RESPONSE.to_le_bytes());
        Self::send(guest, &Packet::new(ports, RW, 4), b"fine");
        let mut bytes = [0; 5];
        assert_eq!(self.hosts[0].read(&mut bytes).ok(), Some(4));
        assert_eq!(bytes[..4], *b"fine");
    }
}
