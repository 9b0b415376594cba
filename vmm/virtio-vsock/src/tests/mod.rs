//! The device with sockets of the test, and a driver for it.

mod closing;
mod flow;
mod hostile;
mod lifecycle;
mod opening;
mod snapshot;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use husk_devices::GuestMem;
use husk_devices::virtio::testing::{Driver, Interrupts, WRITE, memory, wait_for};
use husk_devices::virtio::{Activation, ActiveQueue, VirtioDevice};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use crate::credit::BUFFER;
use crate::packet::*;
use crate::{Vsock, VsockHandle};

const CID: u64 = 3;
/// Entries of each queue.
const SIZE: u16 = 128;
/// Bytes of a receive buffer.
const ROOM: u32 = 4096;
const RECEIVED: u64 = 0x10_0000;
const SENT: u64 = 0x40_0000;
const END: usize = 0x200_0000;
const FEATURES: u64 = 1 | 1 << 29;

/// Time limit on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Address of queue `index`.
fn ring(index: u16) -> u64 {
    0x1_0000 + 0x4000 * u64::from(index)
}

fn received(head: u16) -> u64 {
    RECEIVED + u64::from(head) * u64::from(ROOM)
}

/// Number and port of the requests that the host was told.
type Requests = Arc<Mutex<Vec<(u64, u32)>>>;

struct Guest {
    mem: GuestMem,
    interrupts: Arc<Interrupts>,
    vsock: Vsock,
    handle: VsockHandle,
    requests: Requests,
    /// Receive, transmit and event queue.
    queues: Vec<Driver>,
    /// What the guest says of its own buffer.
    buf_alloc: u32,
    fwd_cnt: u32,
}

impl Guest {
    /// A device and a driver that offers buffers.
    fn new() -> Self {
        let requests = Requests::default();
        let told = Arc::clone(&requests);
        let on_request = move |id, port| {
            let mut told = told.lock().unwrap();
            told.push((id, port));
            told.len() <= 1000
        };
        let (vsock, handle) = Vsock::new(CID as u32, Arc::new(on_request)).unwrap();
        let mut guest = Self {
            mem: memory(&[(0, END)]),
            interrupts: Interrupts::new(),
            vsock,
            handle,
            requests,
            queues: Vec::new(),
            buf_alloc: 0x4_0000,
            fwd_cnt: 0,
        };
        guest.start();
        guest
    }

    /// A new driver.
    fn start(&mut self) {
        self.start_silent();
        self.offer(SIZE - 1);
    }

    /// A new driver without receive buffers.
    fn start_silent(&mut self) {
        self.vsock.reset();
        self.interrupts = Interrupts::new();
        self.queues = (0..3)
            .map(|index| {
                let zeroes = vec![0; 0x4000];
                self.mem
                    .memory()
                    .write_slice(&zeroes, GuestAddress(ring(index)))
                    .unwrap();
                Driver::new(&self.mem, index, SIZE, ring(index))
            })
            .collect();
        let queues = self.queues.iter().map(|queue| queue.queue(true)).collect();
        self.activate(queues);
    }

    fn activate(&mut self, queues: Vec<ActiveQueue>) {
        let activation = Activation {
            mem: self.mem.clone(),
            features: FEATURES,
            queues,
            interrupt: Arc::clone(&self.interrupts) as _,
        };
        self.vsock.activate(activation).unwrap();
    }

    /// Adds receive buffers.
    fn offer(&mut self, count: u16) {
        for _ in 0..count {
            let at = received(self.queues[0].next_head());
            self.queues[0].add(&[(at, ROOM, WRITE)]);
        }
        self.queues[0].kick();
    }

    fn header(&self, guest_port: u32, host_port: u32, op: u16) -> Header {
        Header {
            src_cid: CID,
            dst_cid: HOST_CID,
            src_port: guest_port,
            dst_port: host_port,
            kind: STREAM,
            op,
            buf_alloc: self.buf_alloc,
            fwd_cnt: self.fwd_cnt,
            ..Header::default()
        }
    }

    /// Sends a packet, and waits until the device has it.
    fn send_packet(&mut self, header: &Header, payload: &[u8]) {
        let bytes = [&header.to_bytes()[..], payload].concat();
        let at = SENT + u64::from(self.queues[1].next_head()) * 0x2_0000;
        self.mem.memory().write_slice(&bytes, GuestAddress(at)).unwrap();
        // The header on its own, as Linux does.
        let rest = (at + HEADER_LEN as u64, payload.len() as u32, 0);
        let parts = [(at, HEADER_LEN as u32, 0), rest];
        self.queues[1].add(&parts[..if payload.is_empty() { 1 } else { 2 }]);
        self.queues[1].kick();
        assert_eq!(self.queues[1].wait().1, 0);
    }

    fn send(&mut self, guest_port: u32, host_port: u32, op: u16) {
        let header = self.header(guest_port, host_port, op);
        self.send_packet(&header, &[]);
    }

    fn send_flags(&mut self, guest_port: u32, host_port: u32, flags: u32) {
        let header = Header {
            flags,
            ..self.header(guest_port, host_port, SHUTDOWN)
        };
        self.send_packet(&header, &[]);
    }

    fn send_bytes(&mut self, guest_port: u32, host_port: u32, bytes: &[u8]) {
        let len = bytes.len() as u32;
        let header = Header {
            len,
            ..self.header(guest_port, host_port, RW)
        };
        self.send_packet(&header, bytes);
    }

    /// The packet that the device has sent, if there is one. Offers a new buffer.
    fn try_next(&mut self) -> Option<(Header, Vec<u8>)> {
        let (head, len) = self.queues[0].used()?;
        let mut bytes = vec![0; len as usize];
        self.mem
            .memory()
            .read_slice(&mut bytes, GuestAddress(received(head)))
            .unwrap();
        self.offer(1);
        let header = Header::from_bytes(bytes.first_chunk().unwrap());
        assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
        assert_eq!(header.len as usize, bytes.len() - HEADER_LEN);
        Some((header, bytes.split_off(HEADER_LEN)))
    }

    fn next(&mut self) -> (Header, Vec<u8>) {
        wait_for("a packet", || self.try_next())
    }

    /// The next packet, which must be of this connection and operation.
    fn expect(&mut self, guest_port: u32, host_port: u32, op: u16) -> Header {
        let (header, _) = self.next();
        assert_eq!(
            (header.dst_port, header.src_port, header.op),
            (guest_port, host_port, op),
            "{header:?}"
        );
        header
    }

    /// The device has sent nothing, and does nothing.
    fn expect_nothing(&mut self) {
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(self.try_next(), None);
    }

    /// The next request that the host was told.
    fn request(&self) -> (u64, u32) {
        wait_for("a request", || {
            let mut requests = self.requests.lock().unwrap();
            (!requests.is_empty()).then(|| requests.remove(0))
        })
    }

    /// A connection that the guest begins.
    fn connect(&mut self, guest_port: u32, host_port: u32) -> UnixStream {
        self.send(guest_port, host_port, REQUEST);
        let (id, port) = self.request();
        assert_eq!(port, host_port);
        let (host, stream) = pair();
        self.handle.answer(id, Some(stream.into())).unwrap();
        self.expect(guest_port, host_port, RESPONSE);
        host
    }

    /// A connection that the host begins, and its port of the host.
    fn accept(&mut self, guest_port: u32) -> (UnixStream, u32) {
        let (mut host, stream) = pair();
        self.handle.connect(guest_port, stream.into()).unwrap();
        let (header, _) = self.next();
        assert_eq!((header.op, header.dst_port), (REQUEST, guest_port));
        self.send(guest_port, header.src_port, RESPONSE);
        let greeting = format!("OK {}\n", header.src_port);
        assert_eq!(heard(&mut host, greeting.len()), greeting.as_bytes());
        (host, header.src_port)
    }

    fn broken(&self) -> String {
        wait_for("a reset", || self.interrupts.reset())
    }
}

fn pair() -> (UnixStream, UnixStream) {
    let (host, stream) = UnixStream::pair().unwrap();
    host.set_read_timeout(Some(TIMEOUT)).unwrap();
    host.set_write_timeout(Some(TIMEOUT)).unwrap();
    (host, stream)
}

fn heard(host: &mut UnixStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    host.read_exact(&mut bytes).unwrap();
    bytes
}

/// Everything up to the end.
fn heard_all(host: &mut UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    host.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Bytes that differ from their neighbours.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed)
        .collect()
}

/// Writes until the socket is full. Returns the number of bytes.
fn fill(host: &mut UnixStream) -> usize {
    host.set_nonblocking(true).unwrap();
    let mut count = 0;
    while let Ok(more) = host.write(&[0; 4096]) {
        count += more;
    }
    host.set_nonblocking(false).unwrap();
    count
}
