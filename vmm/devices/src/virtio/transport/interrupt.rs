//! Interrupts of a device as the driver sees them: MSI-X vectors, device status, ISR status.
//!
//! Called from worker threads while a vCPU may wait for that very worker under the transport's lock, so
//! everything here is atomic and nothing takes that lock.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, Ordering};

use vmm_sys_util::eventfd::EventFd;

use crate::pci::Msix;
use crate::virtio::VirtioInterrupt;

/// No vector is mapped (virtio 1.2, section 4.1.4.3): `VIRTIO_MSI_NO_VECTOR`.
pub const NO_VECTOR: u16 = 0xffff;

/// Device status bits (virtio 1.2, section 2.1).
pub mod status {
    /// The guest has noticed the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The guest knows how to drive it.
    pub const DRIVER: u8 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u8 = 4;
    /// Features are negotiated.
    pub const FEATURES_OK: u8 = 8;
    /// The device needs a reset.
    pub const NEEDS_RESET: u8 = 0x40;
    /// The driver gave up.
    pub const FAILED: u8 = 0x80;
}

const LOGGED_FAILURES: u32 = 16;

const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// The interrupt side of one virtio function.
#[derive(Debug)]
pub(super) struct TransportInterrupt {
    name: String,
    msix: Msix,
    failures: AtomicU32,
    status: AtomicU8,
    isr: AtomicU8,
    generation: AtomicU8,
    config_vector: AtomicU16,
    queue_vectors: Box<[AtomicU16]>,
}

impl TransportInterrupt {
    pub fn new(name: &str, msix: Msix, queues: usize) -> Self {
        Self {
            name: name.to_owned(),
            msix,
            failures: AtomicU32::new(0),
            status: AtomicU8::new(0),
            isr: AtomicU8::new(0),
            generation: AtomicU8::new(0),
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn msix(&self) -> &Msix {
        &self.msix
    }

    pub fn status(&self) -> u8 {
        self.status.load(Ordering::Acquire)
    }

    pub fn has(&self, bits: u8) -> bool {
        self.status() & bits == bits
    }

    /// Sets status bits; only a reset clears any.
    pub fn set_status(&self, bits: u8) {
        self.status.fetch_or(bits, Ordering::AcqRel);
    }

    /// Reading the ISR status clears it (section 4.1.4.5).
    pub fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    pub fn isr(&self) -> u8 {
        self.isr.load(Ordering::Acquire)
    }

    pub fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    pub fn config_vector(&self) -> u16 {
        self.config_vector.load(Ordering::Acquire)
    }

    pub fn queue_vector(&self, queue: usize) -> u16 {
        self.queue_vectors
            .get(queue)
            .map_or(NO_VECTOR, |v| v.load(Ordering::Acquire))
    }

    /// Maps configuration changes to a vector. A vector that does not exist maps to [`NO_VECTOR`], which the driver
    /// sees by reading back (section 4.1.5.1.2).
    pub fn map_config(&self, vector: u16) {
        self.config_vector.store(self.existing(vector), Ordering::Release);
    }

    /// Maps a queue to a vector, in the same way.
    pub fn map_queue(&self, queue: usize, vector: u16) {
        if let Some(mapped) = self.queue_vectors.get(queue) {
            mapped.store(self.existing(vector), Ordering::Release);
        }
    }

    fn existing(&self, vector: u16) -> u16 {
        if vector < self.msix.len() {
            vector
        } else {
            NO_VECTOR
        }
    }

    /// Clears the state that a device reset clears (section 2.4). MSI-X belongs to the function and stays.
    pub fn reset(&self) {
        self.map_config(NO_VECTOR);
        (0..self.queue_vectors.len()).for_each(|queue| self.map_queue(queue, NO_VECTOR));
        self.isr.store(0, Ordering::Release);
        self.status.store(0, Ordering::Release);
    }

    /// Restores a saved status. Interrupts raised since it was saved stay raised. The generation advances, because
    /// the device's configuration may have changed in between.
    pub fn load(&self, status: u8, isr: u8, generation: u8) {
        self.status.store(status, Ordering::Release);
        self.isr.fetch_or(isr, Ordering::AcqRel);
        self.generation
            .store(generation.wrapping_add(1), Ordering::Release);
    }

    fn raise(&self, vector: u16, cause: u8) {
        if !self.msix.signal(vector) {
            // There is no INTx pin: without a vector, a driver can only poll the ISR status.
            self.isr.fetch_or(cause, Ordering::AcqRel);
        }
    }
}

impl VirtioInterrupt for TransportInterrupt {
    fn signal_queue(&self, queue: u16) {
        self.raise(self.queue_vector(usize::from(queue)), ISR_QUEUE);
    }

    fn queue_event(&self, queue: u16) -> Option<EventFd> {
        self.msix.trigger(self.queue_vector(usize::from(queue)))
    }

    fn signal_config(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.raise(self.config_vector(), ISR_CONFIG);
    }

    fn needs_reset(&self, reason: &str) {
        if self.status.fetch_or(status::NEEDS_RESET, Ordering::AcqRel) & status::NEEDS_RESET != 0 {
            return;
        }
        // A guest can cause this without limit.
        if self.failures.fetch_add(1, Ordering::Relaxed) < LOGGED_FAILURES {
            tracing::warn!(device = self.name, reason, "device needs a reset by its driver");
        }
        // Section 2.1.2: notify the driver only after DRIVER_OK.
        if self.has(status::DRIVER_OK) {
            self.signal_config();
        }
    }
}
