//! A guest's driver with one controller, on images or on an engine that the test controls.

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use husk_devices::GuestMem;
use husk_devices::virtio::testing::{Descriptor, Driver, Interrupts, WRITE, memory, wait_for};
use husk_devices::virtio::{Activation, ActiveQueue, VirtioDevice};
use husk_disk::testing::{BackendScript, RecordedCall};
use husk_disk::{Disk, DiskOptions, Engine, EngineKind, ErrorPolicy};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};

use crate::target::Lun;
use crate::{Medium, NewUnit, QUEUE_SIZE, ScsiConfig, ScsiError, ScsiHandle, UnitAddress, VirtioScsi};

mod backlog;
mod formats;
mod functions;
mod hostile;
mod hotplug;
mod lifecycle;
mod media;
mod passthrough;
mod pending_events;
mod requests;
mod snapshot;

const HOTPLUG: u64 = 1 << 1;
const CHANGE: u64 = 1 << 2;

/// Memory: rings, then headers, responses and tables of descriptors, then data.
const RINGS: u64 = 0x1_0000;
const HEADERS: u64 = 0x20_0000;
const RESPONSES: u64 = 0x30_0000;
const DATA: u64 = 0x40_0000;
const END: usize = 0x100_0000;

const HEADER: u32 = 51;
const RESPONSE: u32 = 108;

const BLOCKS: u64 = 2048;

/// Shorter than in production, because tests wait for it.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(2);

struct Guest {
    mem: GuestMem,
    control: Driver,
    event: Driver,
    request: Vec<Driver>,
    interrupts: Arc<Interrupts>,
    scsi: ManuallyDrop<VirtioScsi>,
    handle: ScsiHandle,
    stops: Arc<Mutex<Vec<String>>>,
    /// The actor's thread, from the last of them.
    thread: Arc<AtomicI32>,
    event_idx: bool,
    requests: u64,
    /// Buffers for events in use by the driver.
    buffers: Vec<u64>,
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ended {
    code: u8,
    status: u8,
    sense: Vec<u8>,
    residual: u32,
    used: u32,
}

impl Ended {
    fn good(&self) -> bool {
        self.code == 0 && self.status == 0
    }

    /// Sense key, additional sense code and qualifier.
    fn sense(&self) -> (u8, u8, u8) {
        assert_eq!((self.code, self.status), (0, 2), "{self:x?}");
        (self.sense[2] & 0xf, self.sense[12], self.sense[13])
    }
}

fn at(target: u8, lun: u16) -> UnitAddress {
    let lun = Lun::new(lun).unwrap();
    UnitAddress { target, lun }
}

fn image(blocks: u64) -> File {
    let file = tempfile::tempfile_in("/var/tmp").unwrap();
    file.set_len(blocks * 512).unwrap();
    file
}

fn open(file: &File, options: DiskOptions) -> Disk {
    Disk::open_raw(file.try_clone().unwrap().into(), options).unwrap()
}

fn reporting() -> DiskOptions {
    DiskOptions {
        error_policy: ErrorPolicy::Report,
        ..DiskOptions::default()
    }
}

fn unit(id: &str, address: UnitAddress, disk: Disk) -> NewUnit {
    NewUnit {
        id: id.into(),
        address,
        serial: String::new(),
        medium: Medium::Disk(disk),
        shareable: false,
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // A failed test completes no calls, for which the controller would wait.
        if !thread::panicking() {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.scsi) };
        }
    }
}

impl Guest {
    /// A guest with a disk at target 0, LUN 0, whose power-on attentions are cleared.
    fn new() -> (Self, File) {
        let file = image(BLOCKS);
        let disk = unit("first", at(0, 0), open(&file, reporting()));
        let engine = Engine::new(EngineKind::Auto, 128, 4096).unwrap();
        let mut guest = Self::with(engine, vec![disk], true);
        guest.settle(0, 0);
        (guest, file)
    }

    /// The same with an engine that the test drives, for requests of `depth`.
    fn scripted(depth: u16, policy: ErrorPolicy) -> (Self, BackendScript) {
        let options = DiskOptions {
            error_policy: policy,
            ..DiskOptions::default()
        };
        let (engine, script) = BackendScript::engine(depth);
        let disk = |id, lun| unit(id, at(0, lun), open(&image(BLOCKS), options));
        let mut guest = Self::with(engine, vec![disk("first", 0), disk("second", 1)], true);
        guest.settle(0, 0);
        guest.settle(0, 1);
        (guest, script)
    }

    fn with(engine: Engine, units: Vec<NewUnit>, event_idx: bool) -> Self {
        let stops = Arc::<Mutex<Vec<String>>>::default();
        let thread = Arc::new(AtomicI32::new(-1));
        let setup = ScsiConfig {
            queues: 2,
            max_target: 255,
            units,
            engine: EngineKind::Auto,
            on_io_error: {
                let (stops, thread) = (Arc::clone(&stops), Arc::clone(&thread));
                Arc::new(move |id, _| {
                    // SAFETY: asks for the calling thread's number.
                    thread.store(unsafe { libc::gettid() }, Ordering::SeqCst);
                    stops.lock().unwrap().push(id.to_owned());
                })
            },
        };
        let (scsi, handle) = VirtioScsi::with_engine(setup, engine, REMOVAL_TIMEOUT).unwrap();
        let mem = memory(&[(0, END)]);
        let driver = |index| Driver::new(&mem, index, QUEUE_SIZE, RINGS * u64::from(index + 1));
        let mut guest = Self {
            control: driver(0),
            event: driver(1),
            request: vec![driver(2), driver(3)],
            mem,
            interrupts: Interrupts::new(),
            scsi: ManuallyDrop::new(scsi),
            handle,
            stops,
            thread,
            event_idx,
            requests: 0,
            buffers: Vec::new(),
        };
        guest.connect(HOTPLUG | CHANGE);
        guest
    }

    /// A new driver takes over, after a reset, with eight buffers for events.
    fn connect(&mut self, features: u64) {
        self.scsi.reset();
        let queues = self.new_queues();
        self.activate(features, queues);
        for buffer in 0..8 {
            self.give(DATA - 0x1000 + 16 * buffer);
        }
    }

    /// The queues of a new driver.
    fn new_queues(&mut self) -> Vec<ActiveQueue> {
        let zeroes = vec![0; 5 * RINGS as usize];
        self.put(RINGS, &zeroes);
        let mem = self.mem.clone();
        let driver = |index| Driver::new(&mem, index, QUEUE_SIZE, RINGS * u64::from(index + 1));
        (self.control, self.event) = (driver(0), driver(1));
        self.request = vec![driver(2), driver(3)];
        self.buffers.clear();
        let drivers = [&self.control, &self.event, &self.request[0], &self.request[1]];
        drivers.map(|driver| driver.queue(self.event_idx)).into()
    }

    fn activate(&mut self, features: u64, queues: Vec<ActiveQueue>) {
        let activation = Activation {
            mem: self.mem.clone(),
            features,
            queues,
            interrupt: Arc::clone(&self.interrupts) as _,
        };
        self.scsi.activate(activation).unwrap();
    }

    /// Adds a buffer for an event and notifies the device.
    fn give(&mut self, buffer: u64) {
        self.event.add(&[(buffer, 16, WRITE)]);
        self.buffers.push(buffer);
        self.event.kick();
    }

    /// The next event, and its buffer, which is not returned to the device.
    fn event(&mut self) -> Option<([u8; 16], u64)> {
        let (_, len) = self.event.used()?;
        assert_eq!(len, 16);
        let buffer = self.buffers.remove(0);
        Some((self.get(buffer, 16).try_into().unwrap(), buffer))
    }

    fn wait_event(&mut self) -> ([u8; 16], u64) {
        wait_for("an event", || self.event())
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.mem.memory().write_slice(bytes, GuestAddress(at)).unwrap();
    }

    fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mem = self.mem.memory();
        mem.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    /// Writes a header; returns the descriptors of header and response.
    fn frame(&mut self, lun: [u8; 8], id: u64, attribute: u8, cdb: &[u8]) -> (Descriptor, Descriptor) {
        let slot = self.requests % 1024;
        self.requests += 1;
        let (header, response) = (HEADERS + 64 * slot, RESPONSES + 128 * slot);
        let mut bytes = [0; HEADER as usize];
        bytes[..8].copy_from_slice(&lun);
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        bytes[16] = attribute;
        bytes[19..19 + cdb.len()].copy_from_slice(cdb);
        self.put(header, &bytes);
        self.put(response, &[0xee; RESPONSE as usize]);
        ((header, HEADER, 0), (response, RESPONSE, WRITE))
    }

    /// Adds a request to the first request queue without a notification. Returns its head and the address of its
    /// response.
    fn add_with(
        &mut self,
        lun: [u8; 8],
        id: u64,
        attribute: u8,
        cdb: &[u8],
        data: &[Descriptor],
    ) -> (u16, u64) {
        let (header, response) = self.frame(lun, id, attribute, cdb);
        let is_in = |d: &&Descriptor| d.2 & WRITE != 0;
        let data_out: Vec<_> = data.iter().filter(|d| !is_in(d)).copied().collect();
        let data_in: Vec<_> = data.iter().filter(is_in).copied().collect();
        let chain = [&[header][..], &data_out, &[response], &data_in].concat();
        (self.request[0].add(&chain), response.0)
    }

    fn add(&mut self, address: UnitAddress, cdb: &[u8], data: &[Descriptor]) -> (u16, u64) {
        let id = self.requests;
        self.add_with(field(address), id, 0, cdb, data)
    }

    fn ended(&self, response: u64, used: u32) -> Ended {
        let bytes = self.get(response, RESPONSE as usize);
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Ended {
            code: bytes[11],
            status: bytes[10],
            sense: bytes[12..12 + word(0) as usize].to_vec(),
            residual: word(4),
            used,
        }
    }

    /// Performs one request.
    fn run(&mut self, address: UnitAddress, cdb: &[u8], data: &[Descriptor]) -> Ended {
        self.run_at(field(address), cdb, data)
    }

    fn run_at(&mut self, lun: [u8; 8], cdb: &[u8], data: &[Descriptor]) -> Ended {
        let (head, response) = self.add_with(lun, self.requests, 0, cdb, data);
        self.request[0].kick();
        let (used, len) = self.request[0].wait();
        assert_eq!(used, head);
        self.ended(response, len)
    }

    /// Clears the power-on attention of a unit.
    fn settle(&mut self, target: u8, lun: u16) {
        self.settle_with(target, lun, (6, 0x29, 0));
    }

    fn settle_with(&mut self, target: u8, lun: u16, sense: (u8, u8, u8)) {
        let ended = self.run(at(target, lun), &[0; 6], &[]);
        assert_eq!(ended.sense(), sense);
    }

    /// Starts a task management function. Returns the address of its response.
    fn manage(&mut self, kind: u32, lun: [u8; 8], id: u64) -> u64 {
        let (header, (response, ..)) = self.frame([0; 8], 0, 0, &[]);
        let mut bytes = [0; 24];
        bytes[4..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&lun);
        bytes[16..].copy_from_slice(&id.to_le_bytes());
        self.put(header.0, &bytes);
        self.control.add(&[(header.0, 24, 0), (response, 1, WRITE)]);
        self.control.kick();
        response
    }

    /// Performs a task management function.
    fn managed(&mut self, kind: u32, lun: [u8; 8], id: u64) -> u8 {
        let response = self.manage(kind, lun, id);
        assert_eq!(self.control.wait().1, 1);
        self.get(response, 1)[0]
    }

    fn made(script: &BackendScript, count: usize) -> Vec<RecordedCall> {
        wait_for("calls", || {
            let made = script.made();
            (made.len() >= count).then_some(made)
        })
    }

    fn is_broken(&self) -> bool {
        self.interrupts.reset().is_some()
    }
}

/// The LUN field of a request.
fn field(address: UnitAddress) -> [u8; 8] {
    let [high, low] = address.lun.number().to_be_bytes();
    [1, address.target, 0x40 | high, low, 0, 0, 0, 0]
}

fn read10(block: u32, count: u16) -> [u8; 10] {
    transfer10(0x28, block, count)
}

fn write10(block: u32, count: u16) -> [u8; 10] {
    transfer10(0x2a, block, count)
}

fn transfer10(opcode: u8, block: u32, count: u16) -> [u8; 10] {
    let mut cdb = [0; 10];
    cdb[0] = opcode;
    cdb[2..6].copy_from_slice(&block.to_be_bytes());
    cdb[7..9].copy_from_slice(&count.to_be_bytes());
    cdb
}

const SYNCHRONIZE_CACHE: [u8; 10] = [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(37) ^ (i >> 8) as u8 ^ seed)
        .collect()
}

fn content(file: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

/// Waits long enough for the actor to misbehave.
fn linger() {
    thread::sleep(Duration::from_millis(30));
}
