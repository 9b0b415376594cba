//! A guest's driver with one virtio-blk device on a temporary image.
#![allow(dead_code)]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use husk_devices::GuestMem;
use husk_devices::virtio::testing::{Descriptor, Driver, Interrupts, WRITE, memory};
use husk_devices::virtio::{Activation, ActiveQueue, VirtioDevice};
use husk_disk::{Disk, DiskOptions, EngineKind, ErrorPolicy};
use husk_virtio_blk::{Blk, BlkHandle, BlkSetup};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;

pub const F_FLUSH: u64 = 1 << 9;

pub const SECTORS: u64 = 2048;
pub use husk_virtio_blk::QUEUE_SIZE;
/// Memory: rings, then headers and statuses, then data, up to a hole; more after it.
pub const HEADERS: u64 = 0x1_0000;
pub const STATUSES: u64 = 0x2_0000;
pub const TABLES: u64 = 0x3_0000;
pub const DATA: u64 = 0x10_0000;
pub const END: usize = 0x40_0000;
pub const BEYOND: u64 = 0x1000_0000;

pub struct Guest {
    pub mem: GuestMem,
    pub driver: Driver,
    pub interrupts: Arc<Interrupts>,
    pub blk: Blk,
    pub handle: BlkHandle,
    /// Errors that the device reported to its owner.
    pub stops: Arc<Mutex<Vec<io::Error>>>,
    pub file: File,
    pub event_idx: bool,
    requests: u64,
}

pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(37) ^ (i >> 8) as u8 ^ seed)
        .collect()
}

pub fn blk(
    disk: Disk,
    queues: u16,
    engine: EngineKind,
    stops: &Arc<Mutex<Vec<io::Error>>>,
) -> (Blk, BlkHandle) {
    let stops = Arc::clone(stops);
    let setup = BlkSetup {
        id: "test".into(),
        disk,
        serial: "serial-0123456789abcdef".into(),
        queues,
        engine,
        on_io_stop: Arc::new(move |error| stops.lock().unwrap().push(error)),
    };
    Blk::new(setup).unwrap()
}

impl Guest {
    /// A disk that reports errors, unless `options` are other than the default.
    pub fn new(kind: EngineKind, event_idx: bool) -> Self {
        let error_policy = ErrorPolicy::Report;
        let options = DiskOptions {
            error_policy,
            ..DiskOptions::default()
        };
        Self::with(kind, 1, options, event_idx)
    }

    pub fn with(kind: EngineKind, queues: u16, options: DiskOptions, event_idx: bool) -> Self {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.write_all_at(&pattern((SECTORS * 512) as usize, 0), 0)
            .unwrap();
        let disk = Disk::open_raw(file.try_clone().unwrap().into(), options).unwrap();
        Self::on(disk, file, kind, queues, event_idx)
    }

    /// A guest with a disk backed by `file`.
    pub fn on(disk: Disk, file: File, kind: EngineKind, queues: u16, event_idx: bool) -> Self {
        let mem = memory(&[(0, END), (BEYOND, END)]);
        let driver = Driver::new(&mem, 0, QUEUE_SIZE, 0x1000);
        let interrupts = Interrupts::new();
        let stops = Arc::<Mutex<Vec<io::Error>>>::default();
        let (blk, handle) = blk(disk, queues, kind, &stops);
        let mut guest = Self {
            mem,
            driver,
            interrupts,
            blk,
            handle,
            stops,
            file,
            event_idx,
            requests: 0,
        };
        guest.connect(F_FLUSH);
        guest
    }

    /// A new driver takes over, after a reset.
    pub fn connect(&mut self, features: u64) {
        self.blk.reset();
        self.mem
            .memory()
            .write_slice(&[0; 0x8000], GuestAddress(0x1000))
            .unwrap();
        self.driver = Driver::new(&self.mem, 0, QUEUE_SIZE, 0x1000);
        self.activate(features, vec![self.driver.queue(self.event_idx)]);
    }

    pub fn activate(&mut self, features: u64, queues: Vec<ActiveQueue>) {
        let interrupt = Arc::clone(&self.interrupts) as _;
        let activation = Activation {
            mem: self.mem.clone(),
            features,
            queues,
            interrupt,
        };
        self.blk.activate(activation).unwrap();
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.mem.memory().write_slice(bytes, GuestAddress(at)).unwrap();
    }

    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mem
            .memory()
            .read_slice(&mut bytes, GuestAddress(at))
            .unwrap();
        bytes
    }

    pub fn disk(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    /// Writes a header and a status that is no status; returns their descriptors.
    pub fn frame(&mut self, kind: u32, sector: u64) -> (Descriptor, Descriptor) {
        let slot = self.requests % 1024;
        self.requests += 1;
        let (header, status) = (HEADERS + 16 * slot, STATUSES + slot);
        self.put(
            header,
            &[&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat(),
        );
        self.put(status, &[0xff]);
        ((header, 16, 0), (status, 1, WRITE))
    }

    /// Adds a chain of header, `data` and status without a notification. Returns its head and the address of its
    /// status.
    pub fn add(&mut self, kind: u32, sector: u64, data: &[Descriptor]) -> (u16, u64) {
        let (header, status) = self.frame(kind, sector);
        (self.driver.add(&[&[header], data, &[status]].concat()), status.0)
    }

    /// Performs one request. Returns its status and the length the device says it wrote.
    pub fn request(&mut self, kind: u32, sector: u64, data: &[Descriptor]) -> (u8, u32) {
        let (head, status) = self.add(kind, sector, data);
        self.driver.kick();
        let (used, len) = self.driver.wait();
        assert_eq!(used, head);
        (self.get(status, 1)[0], len)
    }

    /// Performs a discard or write-zeroes request.
    pub fn range(&mut self, kind: u32, sector: u64, sectors: u32, flags: u32) -> u8 {
        self.put(
            DATA,
            &[
                &sector.to_le_bytes()[..],
                &sectors.to_le_bytes(),
                &flags.to_le_bytes(),
            ]
            .concat(),
        );
        self.request(kind, 0, &[(DATA, 16, 0)]).0
    }
}
