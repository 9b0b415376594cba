//! A guest's driver with one virtio-net device on a real tap.

use std::fs::File;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use husk_devices::GuestMem;
use husk_devices::page_log::PageLog;
use husk_devices::virtio::testing::{Driver, Interrupts, WRITE, memory};
use husk_devices::virtio::{Activation, ActiveQueue, VirtioDevice};
use husk_virtio_net::{Mac, Net, NetHandle, NetSetup, QueuePair};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend};

use crate::wire::{ETHERTYPE, TIMEOUT, tap};

pub const MAC: Mac = [2, 0, 0, 0, 0, 1];
pub const PEER: Mac = [2, 0, 0, 0, 0, 2];

const SIZE: u16 = 256;
/// Bytes of a receive buffer.
pub const BUFFER: u64 = 2048;
const RINGS: u64 = 0x1_0000;
const COMMANDS: u64 = 0x8_0000;
const SENT: u64 = 0x10_0000;
const RECEIVED: u64 = 0x80_0000;
const END: usize = 0x100_0000;

pub struct Guest {
    mem: GuestMem,
    pub interrupts: Arc<Interrupts>,
    pub net: Net,
    pub handle: NetHandle,
    taps: Vec<OwnedFd>,
    vhost: bool,
    pairs: u16,
    pub pairs_in_use: usize,
    features: u64,
    receive: Vec<Driver>,
    transmit: Vec<Driver>,
    control: Driver,
    sent: u64,
    /// Address of the buffer with the last frame that arrived.
    received_at: u64,
}

fn open_vhost() -> OwnedFd {
    let opened = File::options().read(true).write(true).open("/dev/vhost-net");
    opened
        .expect("this test needs /dev/vhost-net (modprobe vhost_net)")
        .into()
}

/// A device on the queues of a tap.
fn device(taps: &[OwnedFd], vhost: bool) -> (Net, NetHandle) {
    let pair = |tap: &OwnedFd| QueuePair {
        tap: tap.try_clone().unwrap(),
        vhost: vhost.then(open_vhost),
    };
    let setup = NetSetup {
        id: "test".into(),
        mac: MAC,
        mtu: None,
        link: true,
        pairs: taps.iter().map(pair).collect(),
    };
    Net::new(setup).unwrap()
}

/// A frame of `len` bytes with something in it.
pub fn frame(to: Mac, len: usize, seed: u8) -> Vec<u8> {
    let mut frame = [&to[..], &PEER, &ETHERTYPE].concat();
    frame.extend((frame.len()..len).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed));
    frame
}

impl Guest {
    /// A new tap, and a driver that accepts everything but `without`.
    pub fn new(pairs: u16, without: u64, vhost: bool) -> Self {
        let taps = tap(pairs.into());
        let (net, handle) = device(&taps, vhost);
        let mem = memory(&[(0, END)]);
        let mut guest = Self {
            control: Driver::new(&mem, 0, 64, RINGS),
            mem,
            interrupts: Interrupts::new(),
            net,
            handle,
            taps,
            vhost,
            pairs,
            pairs_in_use: 1,
            features: 0,
            receive: Vec::new(),
            transmit: Vec::new(),
            sent: 0,
            received_at: 0,
        };
        guest.connect(without);
        guest
    }

    /// A new driver takes over, after a reset, and offers all the receive buffers it can.
    pub fn connect(&mut self, without: u64) {
        self.net.reset();
        self.put(RINGS, &vec![0; (COMMANDS - RINGS) as usize]);
        let queue = |index, size| Driver::new(&self.mem, index, size, RINGS + 0x3000 * u64::from(index));
        self.receive = (0..self.pairs).map(|pair| queue(2 * pair, SIZE)).collect();
        self.transmit = (0..self.pairs).map(|pair| queue(2 * pair + 1, SIZE)).collect();
        self.control = queue(2 * self.pairs, 64);
        let drivers = self.receive.iter().chain(&self.transmit);
        let queues = drivers
            .chain([&self.control])
            .map(|driver| driver.queue(true))
            .collect();
        self.features = self.net.features() & !without;
        self.pairs_in_use = 1;
        self.activate(queues);
        for pair in 0..usize::from(self.pairs) {
            (0..SIZE).for_each(|slot| self.offer(pair, slot));
            self.receive[pair].kick();
        }
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
    pub fn pause(&mut self) {
        let queues = self.net.quiesce().unwrap();
        assert_eq!(queues.len(), 2 * usize::from(self.pairs) + 1);
        self.activate(queues);
    }

    /// Restarts the device with this log of what vhost writes, or none. Nothing is dirty then.
    pub fn restart_with_log(&mut self, log: Option<&Arc<PageLog>>) {
        let queues = self.net.quiesce().unwrap();
        self.net.log_pages(log);
        for region in self.mem.memory().iter() {
            region.deref().bitmap().reset();
        }
        self.activate(queues);
    }

    /// True if the buffer of the last frame and the used ring are dirty: in `log` with vhost, in the bitmap of the memory
    /// without.
    pub fn received_is_dirty(&self, log: &PageLog) -> bool {
        let page = self.received_at / 4096;
        if self.vhost {
            let mut pages = vec![0; END / 4096 / 64];
            log.take(0, &mut pages);
            let used = self.receive[0].queue(true).queue.used_ring() / 4096;
            let [buffer, ring] = [page, used].map(|page| pages[(page / 64) as usize] >> (page % 64) & 1 != 0);
            assert_eq!(buffer, ring, "both or neither");
            return buffer;
        }
        let mem = self.mem.memory();
        let region = mem.iter().next().unwrap();
        region.deref().bitmap().is_bit_set(page as usize)
    }

    /// Moves the driver to a device that is built anew on the same tap, of which all queues are in use.
    pub fn reload(&mut self) {
        let queues = self.net.quiesce().unwrap();
        let state = self.net.save().unwrap();
        (self.net, self.handle) = device(&self.taps, self.vhost);
        self.net.restore(&state, self.features).unwrap();
        self.activate(queues);
    }

    /// Gives the device the receive buffer of that descriptor.
    fn offer(&mut self, pair: usize, slot: u16) {
        let at = self.buffer(pair, slot);
        self.receive[pair].put(slot, (at, BUFFER as u32, WRITE), 0);
        self.receive[pair].offer(slot);
    }

    fn buffer(&self, pair: usize, slot: u16) -> u64 {
        RECEIVED + (pair as u64 * u64::from(SIZE) + u64::from(slot)) * BUFFER
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
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

    /// A frame that arrived, with its header, if there is one.
    pub fn try_receive(&mut self, pair: usize) -> Option<([u8; 12], Vec<u8>)> {
        let (mut slot, mut len) = self.receive[pair].used()?;
        self.received_at = self.buffer(pair, slot);
        let mut bytes = self.get(self.received_at, len as usize);
        let buffers = u16::from_le_bytes([bytes[10], bytes[11]]);
        self.offer(pair, slot);
        for _ in 1..buffers {
            (slot, len) = self.receive[pair].used().expect("all buffers of a frame");
            bytes.extend(self.get(self.buffer(pair, slot), len as usize));
            self.offer(pair, slot);
        }
        self.receive[pair].kick();
        let header = *bytes.first_chunk().unwrap();
        Some((header, bytes[12..].to_vec()))
    }

    /// The next frame in `pair`.
    pub fn receive(&mut self, pair: usize) -> ([u8; 12], Vec<u8>) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(frame) = self.try_receive(pair) {
                return frame;
            }
            assert!(Instant::now() < deadline, "no frame arrives");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Sends a frame and waits until the device has it.
    pub fn send(&mut self, pair: usize, header: [u8; 12], frame: &[u8]) {
        self.queue(pair, header, frame);
        self.transmit[pair].kick();
        self.transmit[pair].wait();
    }

    /// Adds a head that is not a descriptor.
    pub fn break_ring(&mut self, pair: usize) {
        self.transmit[pair].offer(SIZE + 1);
        self.transmit[pair].kick();
    }

    /// Sends frames in one go.
    pub fn send_all(&mut self, pair: usize, frames: &[Vec<u8>]) {
        frames.iter().for_each(|frame| self.queue(pair, [0; 12], frame));
        self.transmit[pair].kick();
        for _ in frames {
            self.transmit[pair].wait();
        }
    }

    fn queue(&mut self, pair: usize, header: [u8; 12], frame: &[u8]) {
        let at = SENT + self.sent % 64 * 0x1_8000;
        self.sent += 1;
        self.put(at, &[&header[..], frame].concat());
        let (first, second) = (
            12 + frame.len() as u32 / 2,
            frame.len() as u32 - frame.len() as u32 / 2,
        );
        self.transmit[pair].add(&[(at, first, 0), (at + u64::from(first), second, 0)]);
    }

    /// Runs a command.
    pub fn command(&mut self, bytes: &[u8]) {
        self.put(COMMANDS, bytes);
        self.put(COMMANDS + 0xf00, &[0xff]);
        self.control
            .add(&[(COMMANDS, bytes.len() as u32, 0), (COMMANDS + 0xf00, 1, WRITE)]);
        self.control.kick();
        self.control.wait();
        assert_eq!(self.get(COMMANDS + 0xf00, 1), [0], "{bytes:?}");
    }

    /// Sets the number of pairs in use.
    pub fn use_pairs(&mut self, count: u16) {
        self.command(&[&[4, 0][..], &count.to_le_bytes()].concat());
        self.pairs_in_use = count.into();
    }

    /// Sets the guest offloads.
    pub fn set_offloads(&mut self, bits: u64) {
        self.command(&[&[5, 0][..], &bits.to_le_bytes()].concat());
    }
}
