//! A driver's side of a virtqueue, for the tests of devices.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{ActiveQueue, VirtioInterrupt};
use crate::{GuestMem, GuestMemMmap};

/// Descriptor flag: another descriptor follows.
pub const NEXT: u16 = 1;
/// Descriptor flag: device-writable.
pub const WRITE: u16 = 2;
/// Descriptor flag: a table of descriptors.
pub const INDIRECT: u16 = 4;

/// Time limit for a device on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Guest memory of the given ranges (start, length).
///
/// # Panics
/// If they cannot be mapped.
#[must_use]
pub fn memory(ranges: &[(u64, usize)]) -> GuestMem {
    let ranges: Vec<_> = ranges
        .iter()
        .map(|(start, len)| (GuestAddress(*start), *len))
        .collect();
    GuestMem::new(GuestMemMmap::from_ranges(&ranges).expect("guest memory"))
}

/// One descriptor: address, length, flags without [`NEXT`].
pub type Descriptor = (u64, u32, u16);

/// A driver of one split virtqueue that lies at one address of guest memory.
#[derive(Debug)]
pub struct Driver {
    mem: GuestMem,
    index: u16,
    size: u16,
    base: u64,
    next_descriptor: u16,
    available: u16,
    seen: u16,
    kick: EventFd,
}

impl Driver {
    /// A queue of `size` entries at `base`, which is 4 KiB-aligned; it needs 32 bytes an entry and 64 more.
    ///
    /// # Panics
    /// If no eventfd can be made.
    #[must_use]
    pub fn new(mem: &GuestMem, index: u16, size: u16, base: u64) -> Self {
        let kick = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).expect("eventfd");
        let (next_descriptor, available, seen) = (0, 0, 0);
        Self {
            mem: mem.clone(),
            index,
            size,
            base,
            next_descriptor,
            available,
            seen,
            kick,
        }
    }

    /// Entries of the queue.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    fn avail(&self) -> u64 {
        self.base + 16 * u64::from(self.size)
    }

    fn used_ring(&self) -> u64 {
        (self.avail() + 6 + 2 * u64::from(self.size)).next_multiple_of(4)
    }

    fn write<T: vm_memory::ByteValued>(&self, value: T, at: u64) {
        self.mem
            .memory()
            .write_obj(value, GuestAddress(at))
            .expect("the queue lies in memory");
    }

    fn read<T: vm_memory::ByteValued>(&self, at: u64) -> T {
        self.mem
            .memory()
            .read_obj(GuestAddress(at))
            .expect("the queue lies in memory")
    }

    /// The device's end, as a transport would make it for a new driver.
    ///
    /// # Panics
    /// If the queue does not fit into memory.
    #[must_use]
    pub fn queue(&self, event_idx: bool) -> ActiveQueue {
        let mut queue = Queue::new(self.size).expect("a power of two");
        let split = |address: u64| (Some(address as u32), Some((address >> 32) as u32));
        let (low, high) = split(self.base);
        queue.set_desc_table_address(low, high);
        let (low, high) = split(self.avail());
        queue.set_avail_ring_address(low, high);
        let (low, high) = split(self.used_ring());
        queue.set_used_ring_address(low, high);
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        assert!(queue.is_valid(&*self.mem.memory()));
        ActiveQueue {
            index: self.index,
            queue,
            kick: self.kick.try_clone().expect("eventfd"),
        }
    }

    /// Writes a descriptor into the queue's table.
    pub fn put(&self, at: u16, (address, len, flags): Descriptor, next: u16) {
        self.put_at(self.base, at, (address, len, flags), next);
    }

    fn put_at(&self, table: u64, at: u16, (address, len, flags): Descriptor, next: u16) {
        let at = table + 16 * u64::from(at);
        self.write(address, at);
        self.write(len, at + 8);
        self.write(flags, at + 12);
        self.write(next, at + 14);
    }

    /// The head of the chain that is added next.
    #[must_use]
    pub fn next_head(&self) -> u16 {
        self.next_descriptor
    }

    /// Makes a chain of `descriptors` available, and returns its head.
    pub fn add(&mut self, descriptors: &[Descriptor]) -> u16 {
        let head = self.next_descriptor;
        for (place, &(address, len, flags)) in descriptors.iter().enumerate() {
            let at = self.next_descriptor;
            self.next_descriptor = (at + 1) % self.size;
            let flags = if place + 1 < descriptors.len() {
                flags | NEXT
            } else {
                flags
            };
            self.put(at, (address, len, flags), self.next_descriptor);
        }
        self.offer(head);
        head
    }

    /// Like [`Driver::add`], with the descriptors in a table of their own at `table`.
    pub fn add_indirect(&mut self, table: u64, descriptors: &[Descriptor]) -> u16 {
        for (at, &(address, len, flags)) in (0..).zip(descriptors) {
            let flags = if usize::from(at) + 1 < descriptors.len() {
                flags | NEXT
            } else {
                flags
            };
            self.put_at(table, at, (address, len, flags), at + 1);
        }
        self.add(&[(table, 16 * descriptors.len() as u32, INDIRECT)])
    }

    /// Puts `head` into the available ring; it need not be valid.
    pub fn offer(&mut self, head: u16) {
        self.write(head, self.avail() + 4 + 2 * u64::from(self.available % self.size));
        self.set_available(self.available.wrapping_add(1));
    }

    /// Sets the available ring's index to any value.
    pub fn set_available(&mut self, index: u16) {
        self.available = index;
        std::sync::atomic::fence(Ordering::SeqCst);
        self.write(index, self.avail() + 2);
    }

    /// True if the device wants a notification for the entries added since the available index was `old`.
    #[must_use]
    pub fn wants_kick(&self, event_idx: bool, old: u16) -> bool {
        std::sync::atomic::fence(Ordering::SeqCst);
        if event_idx {
            let event: u16 = self.read(self.used_ring() + 4 + 8 * u64::from(self.size));
            let (new, added) = (self.available, self.available.wrapping_sub(old));
            new.wrapping_sub(event).wrapping_sub(1) < added
        } else {
            self.read::<u16>(self.used_ring()) & 1 == 0
        }
    }

    /// With event index: interrupt only when the used index passes `index`.
    pub fn set_used_event(&self, index: u16) {
        self.write(index, self.avail() + 4 + 2 * u64::from(self.size));
    }

    /// Notifies the device.
    ///
    /// # Panics
    /// If the eventfd is broken.
    pub fn kick(&self) {
        self.kick.write(1).expect("eventfd");
    }

    /// The next used chain: its head and the bytes written.
    pub fn used(&mut self) -> Option<(u16, u32)> {
        if self.read::<u16>(self.used_ring() + 2) == self.seen {
            return None;
        }
        std::sync::atomic::fence(Ordering::SeqCst);
        let at = self.used_ring() + 4 + 8 * u64::from(self.seen % self.size);
        self.seen = self.seen.wrapping_add(1);
        Some((self.read::<u32>(at) as u16, self.read(at + 4)))
    }

    /// Waits for the next used chain.
    ///
    /// # Panics
    /// If the device takes too long.
    pub fn wait(&mut self) -> (u16, u32) {
        wait_for("a used buffer", || self.used())
    }
}

/// Calls `done` until it returns a value.
///
/// # Panics
/// If it takes too long.
pub fn wait_for<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(result) = done() {
            return result;
        }
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Calls `value` until it returns `expected`: a device updates its counters shortly after it acts.
///
/// # Panics
/// If it takes too long.
pub fn wait_until_equal<T: PartialEq + std::fmt::Debug>(expected: &T, mut value: impl FnMut() -> T) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let seen = value();
        if seen == *expected {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "still {seen:?}, instead of {expected:?}"
        );
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// An interrupt sink that counts.
#[derive(Debug, Default)]
pub struct Interrupts {
    queue: AtomicUsize,
    config: AtomicUsize,
    reset: Mutex<Option<String>>,
}

impl Interrupts {
    /// A sink with all counts at 0.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Used-buffer notifications so far.
    #[must_use]
    pub fn queue(&self) -> usize {
        self.queue.load(Ordering::SeqCst)
    }

    /// Configuration changes so far.
    #[must_use]
    pub fn config(&self) -> usize {
        self.config.load(Ordering::SeqCst)
    }

    /// Reason of the last call of `needs_reset`.
    #[must_use]
    pub fn reset(&self) -> Option<String> {
        self.reset.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl VirtioInterrupt for Interrupts {
    fn signal_queue(&self, _queue: u16) {
        self.queue.fetch_add(1, Ordering::SeqCst);
    }

    fn signal_config(&self) {
        self.config.fetch_add(1, Ordering::SeqCst);
    }

    fn needs_reset(&self, reason: &str) {
        *self.reset.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.to_owned());
    }
}
