//! The device with sockets for taps, and a driver for it.

mod control;
mod hostile;
mod lifecycle;
mod receive;
mod snapshot;
mod transmit;

use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use husk_devices::GuestMem;
use husk_devices::virtio::testing::{
    Descriptor, Driver, Interrupts, WRITE, memory, wait_for, wait_until_equal,
};
use husk_devices::virtio::{Activation, ActiveQueue, VirtioDevice};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use crate::header::HEADER_LEN;
use crate::tap::Tap;
use crate::{Mac, Net, NetHandle};

const MAC: Mac = [2, 0, 0, 0, 0, 1];
const PEER: Mac = [2, 0, 0, 0, 0, 2];

/// Address of queue `index`.
fn ring(index: u16) -> u64 {
    0x1_0000 + 0x3000 * u64::from(index)
}
const COMMANDS: u64 = 0x8_0000;
const TABLES: u64 = 0x9_0000;
const SENT: u64 = 0x10_0000;
const RECEIVED: u64 = 0x40_0000;
const END: usize = 0x100_0000;

/// Time limit for a frame on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// All offered features except UDP segmentation.
const ALL: u64 = crate::config::GUEST_OFFLOADS & !(3 << 54) | 0x00ff_b829 | 1 << 2 | 3 << 28;
const MERGEABLE: u64 = 1 << 15;

struct Guest {
    mem: GuestMem,
    interrupts: Arc<Interrupts>,
    net: Net,
    handle: NetHandle,
    /// The device's ends of the taps.
    taps: Vec<UnixDatagram>,
    /// The other ends.
    peers: Vec<UnixDatagram>,
    receive: Vec<Driver>,
    transmit: Vec<Driver>,
    control: Driver,
    features: u64,
    size: u16,
    sent: u64,
    commands: u64,
    /// Address of each receive buffer, by queue and head.
    buffers: Vec<Vec<(u64, u32)>>,
}

/// A frame to `to` with something in it.
fn frame(to: Mac, len: usize, seed: u8) -> Vec<u8> {
    let mut frame = [&to[..], &PEER, &[0x88, 0xb5]].concat();
    frame.extend((frame.len()..len).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed));
    frame
}

fn with_header(frame: &[u8]) -> Vec<u8> {
    [&[0; HEADER_LEN][..], frame].concat()
}

/// Waits long enough for a worker to misbehave.
fn settle() {
    thread::sleep(Duration::from_millis(30));
}

/// A device whose taps are these sockets.
fn over(taps: &[UnixDatagram]) -> (Net, NetHandle) {
    let taps = taps.iter().map(|tap| Tap::fake(tap.try_clone().unwrap().into()));
    Net::over("test".into(), MAC, Some(9000), true, taps.collect(), Vec::new()).unwrap()
}

impl Guest {
    /// One pair with all features.
    fn new() -> Self {
        Self::with(1, ALL, 256)
    }

    fn with(pairs: u16, features: u64, size: u16) -> Self {
        let (mut taps, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..pairs {
            let (tap, peer) = UnixDatagram::pair().unwrap();
            peer.set_read_timeout(Some(TIMEOUT)).unwrap();
            peer.set_write_timeout(Some(TIMEOUT)).unwrap();
            taps.push(tap);
            peers.push(peer);
        }
        let (net, handle) = over(&taps);
        let mem = memory(&[(0, END)]);
        let control = Driver::new(&mem, 2 * pairs, 64, ring(2 * pairs));
        let mut guest = Self {
            mem,
            interrupts: Interrupts::new(),
            net,
            handle,
            taps,
            peers,
            receive: Vec::new(),
            transmit: Vec::new(),
            control,
            features,
            size,
            sent: 0,
            commands: 0,
            buffers: Vec::new(),
        };
        guest.connect();
        guest
    }

    fn pairs(&self) -> u16 {
        self.peers.len() as u16
    }

    fn event_idx(&self) -> bool {
        self.features & 1 << 29 != 0
    }

    /// A new driver takes over, after a reset.
    fn connect(&mut self) {
        self.net.reset();
        self.put(ring(0), &vec![0; (COMMANDS - ring(0)) as usize]);
        let queue = |index| Driver::new(&self.mem, index, self.size, ring(index));
        self.receive = (0..self.pairs()).map(|pair| queue(2 * pair)).collect();
        self.transmit = (0..self.pairs()).map(|pair| queue(2 * pair + 1)).collect();
        let index = crate::config::control_index(self.features, self.pairs());
        self.control = Driver::new(&self.mem, index, 64, ring(index));
        self.buffers = vec![vec![(0, 0); usize::from(self.size)]; self.receive.len()];
        let event_idx = self.event_idx();
        let mut queues = Vec::new();
        for driver in self.receive.iter().chain(&self.transmit) {
            queues.push(driver.queue(event_idx));
        }
        queues.retain(|queue| queue.index != index);
        queues.push(self.control.queue(event_idx));
        self.activate(queues);
    }

    fn activate(&mut self, queues: Vec<ActiveQueue>) {
        let activation = Activation {
            mem: self.mem.clone(),
            features: self.features,
            queues,
            interrupt: Arc::clone(&self.interrupts) as _,
        };
        self.net.activate(activation).unwrap();
    }

    /// Stops and restarts the device.
    fn pause(&mut self) {
        let queues = self.net.quiesce().unwrap();
        self.activate(queues);
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.mem.memory().write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem
            .memory()
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }

    /// Adds `count` receive buffers of `len` bytes and notifies the device.
    fn offer(&mut self, pair: usize, count: usize, len: u32) {
        for _ in 0..count {
            let slot = u64::from(self.receive[pair].next_head());
            let at = RECEIVED + ((pair as u64) << 22) + slot * 0x4000;
            let head = self.receive[pair].add(&[(at, len, WRITE)]);
            self.buffers[pair][usize::from(head)] = (at, len);
        }
        self.receive[pair].kick();
    }

    /// The next frame the device put into buffers, with its header.
    fn received(&mut self, pair: usize) -> Vec<u8> {
        let (head, len) = self.receive[pair].wait();
        let (at, _) = self.buffers[pair][usize::from(head)];
        let mut bytes = self.get(at, len as usize);
        let buffers = u16::from_le_bytes([bytes[10], bytes[11]]);
        for place in 1..buffers {
            // All buffers of a frame are used at once.
            let (head, len) = self.receive[pair]
                .used()
                .unwrap_or_else(|| panic!("buffer {place} of {buffers}"));
            let (at, _) = self.buffers[pair][usize::from(head)];
            bytes.extend(self.get(at, len as usize));
        }
        bytes
    }

    /// Puts `bytes` into memory and a chain of pieces of `size` into the transmit queue.
    fn transmit(&mut self, pair: usize, bytes: &[u8], size: usize) -> u16 {
        let at = SENT + self.sent % 32 * 0x1_8000;
        self.sent += 1;
        self.put(at, bytes);
        let pieces: Vec<Descriptor> = bytes
            .chunks(size)
            .scan(at, |at, piece| {
                let start = *at;
                *at += piece.len() as u64;
                Some((start, piece.len() as u32, 0))
            })
            .collect();
        self.transmit[pair].add(&pieces)
    }

    /// The next frame from the tap.
    fn out(&self, pair: usize) -> Vec<u8> {
        let mut bytes = vec![0; 0x2_0000];
        let len = self.peers[pair].recv(&mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    }

    /// Runs a command, and returns the device's answer.
    fn command(&mut self, bytes: &[u8]) -> u8 {
        let at = COMMANDS + self.commands % 16 * 0x1000;
        self.commands += 1;
        self.put(at, bytes);
        let answer = at + 0xf00;
        self.put(answer, &[0xff]);
        self.control
            .add(&[(at, bytes.len() as u32, 0), (answer, 1, WRITE)]);
        self.control.kick();
        assert_eq!(self.control.wait().1, 1);
        self.get(answer, 1)[0]
    }

    /// Waits until the workers know that the link is down: then they drop the frames of the driver.
    fn link_goes_down(&mut self) {
        let before = self.handle.sent().dropped;
        self.handle.set_link(false);
        wait_for("a link that is down", || {
            self.transmit(0, &with_header(&frame(PEER, 60, 0)), 100);
            self.transmit[0].kick();
            self.transmit[0].wait();
            (self.handle.sent().dropped > before).then_some(())
        });
    }

    /// Sends the guest a frame until it arrives: frames are lost while the link is not up yet.
    fn receives_in_time(&mut self, bytes: &[u8]) -> Vec<u8> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            self.peers[0].send(bytes).unwrap();
            settle();
            if let Some((head, len)) = self.receive[0].used() {
                let (at, _) = self.buffers[0][usize::from(head)];
                return self.get(at, len as usize);
            }
            assert!(Instant::now() < deadline, "no frame arrives");
        }
    }

    fn config(&self) -> [u8; 12] {
        let mut config = [0; 12];
        self.net.read_config(0, &mut config);
        config
    }

    fn broken(&self) -> String {
        wait_for("a reset", || self.interrupts.reset())
    }
}
