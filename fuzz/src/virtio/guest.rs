//! The guest's side of a device: its memory, and a driver that may break the rules.

use std::sync::Arc;
use std::thread;

use husk_devices::GuestMem;
use husk_devices::virtio::testing::{Descriptor, Driver, INDIRECT, Interrupts, memory};
use husk_devices::virtio::{Activation, ActiveQueue, VirtioDevice};
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend};

use super::offered::Offered;
use super::{BEYOND, BEYOND_END, Bench, END, PAGE, Place, QUEUES, SLOT, SLOT_COUNT, SLOTS};

/// The guest's side of a device.
pub struct Guest {
    pub mem: GuestMem,
    /// By index.
    pub drivers: Vec<Driver>,
    pub features: u64,
    pub(super) device: Box<dyn VirtioDevice>,
    pub(super) interrupts: Arc<Interrupts>,
    pub(super) size: u16,
    /// The queues that the driver enabled, and their number.
    queues: Vec<ActiveQueue>,
    enabled: usize,
    running: bool,
    pub(super) offered: Offered,
    /// The memory when the device was started.
    before: Vec<u8>,
    slot: u64,
    /// See [`Bench::DISCARDS`].
    discards: bool,
    /// See [`Bench::PATIENCE`].
    patience: u32,
}

impl Guest {
    pub(super) fn new<B: Bench>(device: Box<dyn VirtioDevice>, size: u8, without: u64) -> Self {
        let beyond = (BEYOND_END - BEYOND) as usize;
        let mut guest = Self {
            mem: memory(&[(0, END as usize), (BEYOND, beyond)]),
            drivers: Vec::new(),
            features: 0,
            device,
            interrupts: Interrupts::new(),
            size: [16, 4, 64][usize::from(size) % 3],
            queues: Vec::new(),
            enabled: 0,
            running: false,
            offered: Offered::new(0, 0),
            before: Vec::new(),
            slot: 0,
            discards: B::DISCARDS,
            patience: B::PATIENCE,
        };
        guest.connect(without, 0, false);
        guest
    }

    /// A new driver, which has not started the device yet.
    pub(super) fn connect(&mut self, without: u64, disabled: u8, works: bool) {
        if works && std::mem::take(&mut self.running) {
            self.reset_at_work();
        } else {
            self.stop();
            self.device.reset();
        }
        self.take_used();
        self.features = self.device.features() & !without;
        self.interrupts = Interrupts::new();
        let event_idx = self.features & 1 << 29 != 0;
        let sizes = self.device.queue_max_sizes();
        let zeroes = [0; 0x1000];
        self.drivers.clear();
        self.queues.clear();
        for (index, max) in (0..).zip(sizes) {
            let base = QUEUES + 0x1000 * u64::from(index);
            let cleared = self.mem.memory().write_slice(&zeroes, GuestAddress(base));
            cleared.expect("the queues lie in memory");
            let driver = Driver::new(&self.mem, index, self.size.min(*max), base);
            if disabled & 1 << (index % 8) == 0 {
                self.queues.push(driver.queue(event_idx));
            }
            self.drivers.push(driver);
        }
        self.enabled = self.queues.len();
        self.offered = Offered::new(self.drivers.len(), self.size);
        if self.discards {
            self.offered.forget();
        }
    }

    /// Resets a device that runs. It writes nothing after that.
    fn reset_at_work(&mut self) {
        self.device.reset();
        self.remember();
        for _ in 0..20 {
            thread::yield_now();
        }
        let changed = self.changed_pages(|_, _| true);
        assert_eq!(changed, [0; 0], "pages that a device has written after its reset");
    }

    /// Keeps the content of the memory, for [`Guest::changed_pages`].
    fn remember(&mut self) {
        // It is kept from one time to the next: new memory costs more than the copy.
        self.before.resize((END + BEYOND_END - BEYOND) as usize, 0);
        let (low, beyond) = self.before.split_at_mut(END as usize);
        for (at, part) in [(0, low), (BEYOND, beyond)] {
            let read = self.mem.memory().read_slice(part, GuestAddress(at));
            read.expect("in memory");
        }
    }

    /// The addresses of pages that have changed, of those for whose region and offset `wanted` returns true.
    fn changed_pages(&self, wanted: impl Fn(usize, usize) -> bool) -> Vec<u64> {
        let mut now = [0; PAGE];
        let mut changed = Vec::new();
        for (region, (start, end)) in [(0, END), (BEYOND, BEYOND_END)].into_iter().enumerate() {
            let before = if region == 0 { 0 } else { END as usize };
            for offset in (0..(end - start) as usize).step_by(PAGE) {
                if wanted(region, offset) {
                    let at = start + offset as u64;
                    let read = self.mem.memory().read_slice(&mut now, GuestAddress(at));
                    read.expect("in memory");
                    // The balloon discards pages.
                    if now != self.before[before + offset..][..PAGE] && now != [0; PAGE] {
                        changed.push(at);
                    }
                }
            }
        }
        changed
    }

    /// Checks the chains that the device has used.
    fn take_used(&mut self) {
        for (index, driver) in self.drivers.iter_mut().enumerate() {
            // A ring that the driver has broken may have any number of entries.
            for _ in 0..driver.size() {
                let Some((head, len)) = driver.used() else { break };
                self.offered.used(index, head, len);
            }
        }
    }

    pub(super) fn start(&mut self) {
        if self.running {
            return;
        }
        self.mem
            .memory()
            .iter()
            .for_each(|region| (**region).bitmap().reset());
        self.remember();
        let interrupt = Arc::clone(&self.interrupts) as _;
        let activation = Activation {
            mem: self.mem.clone(),
            features: self.features,
            queues: std::mem::take(&mut self.queues),
            interrupt,
        };
        match self.device.activate(activation) {
            Ok(()) => self.running = true,
            // The transport has the driver reset the device.
            Err(_) => self.connect(0, 0, false),
        }
    }

    /// Stops the device. Only a worker that panicked keeps its queues.
    pub(super) fn stop(&mut self) {
        if std::mem::take(&mut self.running) {
            self.queues = self.device.quiesce().expect("a device that runs has queues");
            assert_eq!(self.queues.len(), self.enabled, "a queue is lost");
            self.check_dirty();
        }
    }

    /// Each page that has changed is dirty. Else a snapshot lacks what was written.
    fn check_dirty(&self) {
        let memory = self.mem.memory();
        let bitmaps: Vec<_> = memory.iter().map(|region| (**region).bitmap()).collect();
        let clean = self.changed_pages(|region, offset| !bitmaps[region].dirty_at(offset));
        assert_eq!(clean, [0; 0], "pages that have changed and are not dirty");
    }

    /// Lets the device take what is available. Nearly every worker looks at its queues before it looks whether it is to
    /// stop; the others get some time.
    pub fn run(&mut self) {
        self.stop();
        let before = self.interrupts.queue();
        self.start();
        self.give_time(before, self.patience);
        self.stop();
    }

    /// Yields so many times, unless the device breaks or has interrupted since it had done so `before` times.
    fn give_time(&self, before: usize, times: u32) {
        for _ in 0..times {
            if self.interrupts.queue() != before || self.interrupts.reset().is_some() {
                break;
            }
            thread::yield_now();
        }
    }

    /// Notifies the device, and gives it some time if it runs.
    pub(super) fn kick(&self, queue: usize) {
        let before = self.interrupts.queue();
        self.drivers[queue].kick();
        self.give_time(before, if self.running { 20 } else { 0 });
    }

    pub(super) fn queue(&self, queue: u8) -> usize {
        usize::from(queue) % self.drivers.len()
    }

    /// Memory for the parts of a proper request.
    pub fn slot(&mut self) -> u64 {
        self.slot = (self.slot + 1) % SLOT_COUNT;
        self.offered.take_slot();
        SLOTS + SLOT * self.slot
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        let written = self.mem.memory().write_slice(bytes, GuestAddress(at));
        written.expect("in memory");
    }

    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = self.mem.memory().read_slice(&mut bytes, GuestAddress(at));
        read.expect("in memory");
        bytes
    }

    /// Makes a chain available, by a table of its own if `indirect`. Returns its head.
    pub fn add(&mut self, queue: usize, chain: &[Descriptor], indirect: bool) -> u16 {
        let table = self.slot();
        let indirect = indirect && !chain.is_empty() && 16 * chain.len() as u64 <= SLOT;
        let head = match indirect {
            true => self.drivers[queue].add_indirect(table, chain),
            false => self.drivers[queue].add(chain),
        };
        self.offered.add(queue, head, chain, indirect);
        head
    }

    /// Makes a chain available and lets the device serve it. Returns the length that the device says it wrote.
    pub fn serve(&mut self, queue: usize, chain: &[Descriptor]) -> u32 {
        let head = self.drivers[queue].add(chain);
        self.offered.forget();
        self.run();
        let (used, len) = self.drivers[queue].used().unwrap_or_else(|| {
            self.start();
            self.drivers[queue].wait()
        });
        assert_eq!(used, head);
        self.stop();
        len
    }

    pub(super) fn chain(&mut self, queue: usize, chain: &[Descriptor], table: Option<Place>) {
        let Some(table) = table.map(Place::address) else {
            let head = self.drivers[queue].add(chain);
            self.offered.add(queue, head, chain, false);
            return;
        };
        self.offered.forget();
        let len = 16 * chain.len();
        if self.mem.memory().check_range(GuestAddress(table), len) {
            self.drivers[queue].add_indirect(table, chain);
        } else {
            self.drivers[queue].add(&[(table, len as u32, INDIRECT)]);
        }
    }
}
