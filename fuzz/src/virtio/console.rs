//! virtio-console with two ports.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use arbitrary::Arbitrary;
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::testing::WRITE;
use husk_virtio_console::{Console, PortSetup};

use super::{Bench, Guest, Len, pattern, pieces};

const DEVICE_READY: u16 = 0;
const DEVICE_ADD: u16 = 1;

#[derive(Arbitrary, Debug)]
pub enum Request {
    /// A message of the driver, which may be cut short.
    Message {
        port: u8,
        event: u8,
        value: bool,
        len: Option<u8>,
    },
    Transmit {
        port: u8,
        len: u16,
        cut: u8,
    },
    /// Buffers for a queue that the device fills.
    Offer {
        control: bool,
        port: u8,
        count: u8,
        len: Len,
    },
    Host {
        second: bool,
        act: HostAct,
    },
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum HostAct {
    Send(u16),
    Read,
    Close,
}

pub struct ConsoleBench {
    /// The device's ends, and those of the host.
    streams: Vec<UnixStream>,
    hosts: Vec<Option<UnixStream>>,
}

fn message(port: u32, event: u16, value: u16) -> Vec<u8> {
    [
        &port.to_le_bytes()[..],
        &event.to_le_bytes(),
        &value.to_le_bytes(),
    ]
    .concat()
}

/// Index of a port's receive queue.
fn receive_queue(port: u8) -> usize {
    match port % 3 {
        0 => 0,
        port => 2 + 2 * usize::from(port),
    }
}

fn read_all(host: &mut UnixStream) {
    while host.read(&mut [0; 0x1000]).is_ok_and(|count| count > 0) {}
}

impl Bench for ConsoleBench {
    type Setup = ();
    type Request = Request;
    type Handle = ();
    // Whether the host has closed its end.
    const SAME: bool = false;

    fn new((): &()) -> Self {
        let (mut streams, mut hosts) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let (host, stream) = UnixStream::pair().expect("sockets");
            host.set_nonblocking(true).expect("a socket");
            hosts.push(Some(host));
            streams.push(stream);
        }
        Self { streams, hosts }
    }

    fn device(&mut self, _: Option<&()>) -> (Box<dyn VirtioDevice>, ()) {
        let port = |(number, stream): (usize, &UnixStream)| PortSetup {
            name: format!("port{number}"),
            stream: stream.try_clone().expect("a descriptor").into(),
        };
        let ports = self.streams.iter().enumerate().map(port).collect();
        (
            Box::new(Console::new(ports, Arc::new(|_, _| {})).expect("a console")),
            (),
        )
    }

    fn request(&mut self, request: &Request, (): &(), guest: &mut Guest) {
        match *request {
            Request::Message {
                port,
                event,
                value,
                len,
            } => {
                let at = guest.slot();
                let port = if port == u8::MAX {
                    u32::MAX
                } else {
                    u32::from(port % 4)
                };
                guest.put(at, &message(port, u16::from(event % 9), value.into()));
                guest.add(3, &[(at, len.map_or(8, |len| len % 16).into(), 0)], false);
            }
            Request::Transmit { port, len, cut } => {
                let at = guest.slot();
                let queue = receive_queue(port) + 1;
                guest.add(queue, &pieces(at, len.into(), cut.into(), 0), false);
            }
            Request::Offer {
                control,
                port,
                count,
                len,
            } => {
                let queue = if control { 2 } else { receive_queue(port) };
                for _ in 0..count % 16 {
                    let at = guest.slot();
                    guest.add(queue, &[(at, len.bytes(), WRITE)], false);
                }
            }
            Request::Host { second, act } => {
                let Some(host) = &mut self.hosts[usize::from(second)] else {
                    return;
                };
                match act {
                    HostAct::Send(len) => drop(host.write(&pattern(len.into(), 1))),
                    HostAct::Read => read_all(host),
                    HostAct::Close => self.hosts[usize::from(second)] = None,
                }
            }
        }
    }

    fn repair(&mut self, (): &()) {
        self.hosts.iter_mut().flatten().for_each(read_all);
    }

    fn check(&mut self, (): &(), guest: &mut Guest) {
        let (told, sent, ready) = (guest.slot(), guest.slot(), guest.slot());
        guest.drivers[2].add(&[(told, 64, WRITE)]);
        guest.drivers[5].add(&[(sent, 4, 0)]);
        guest.put(sent, b"here");
        guest.put(ready, &message(u32::MAX, DEVICE_READY, 1));
        guest.serve(3, &[(ready, 8, 0)]);
        assert_eq!(guest.drivers[2].used(), Some((0, 8)));
        assert_eq!(guest.get(told, 8), message(1, DEVICE_ADD, 1));
        assert_eq!(guest.drivers[5].used(), Some((0, 0)));
        if let Some(host) = &mut self.hosts[0] {
            let mut bytes = [0; 5];
            assert_eq!(host.read(&mut bytes).ok(), Some(4));
            assert_eq!(bytes[..4], *b"here");
        }
    }
}
