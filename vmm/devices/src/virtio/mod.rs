//! The interface of virtio devices (virtio 1.2), small devices, and the PCI transport.
//!
//! The transport owns a device's negotiation state and the sizes and addresses of its queues. The device owns the
//! queues themselves from [`VirtioDevice::activate`] on. [`VirtioDevice::quiesce`] stops every worker and returns them;
//! [`VirtioDevice::reset`] stops every worker and drops them.

use std::sync::Arc;

use virtio_queue::{Queue, QueueT};
use vmm_sys_util::eventfd::EventFd;

use crate::GuestMem;
use crate::component::{ComponentState, RestoreError, SaveError};
use crate::page_log::PageLog;

pub mod access;
pub mod balloon;
pub mod chain;
pub mod config_space;
pub mod dma;
mod queue_worker;
pub mod rng;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod transport;
pub mod used_batch;

/// A virtio device model without its transport.
pub trait VirtioDevice: Send {
    /// Name for logs and thread names, such as `blk-root`.
    fn name(&self) -> &str;
    /// Device ID (virtio 1.2, section 5).
    fn device_type(&self) -> u32;
    /// PCI class code (base class, subclass, programming interface) shown in configuration space.
    fn pci_class(&self) -> [u8; 3];
    /// Device feature bits offered. The transport adds `VIRTIO_F_VERSION_1` itself; `RING_INDIRECT_DESC`
    /// and `RING_EVENT_IDX` are the device's to offer.
    fn features(&self) -> u64;
    /// The largest size of each queue; its length is the number of queues. Powers of two.
    fn queue_max_sizes(&self) -> &[u16];
    /// Length of device configuration space in bytes, at most 2048. With 0 the transport has no device configuration
    /// capability, so that the driver does not read it. It may exceed the fields that the device defines: the extra
    /// bytes read as zero.
    fn config_size(&self) -> u16 {
        256
    }
    /// Reads device configuration space. Bytes beyond its end read as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);
    /// Writes device configuration space. Writes to read-only fields are ignored.
    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}
    /// Starts serving the queues: the driver has set DRIVER_OK, or a quiesced device continues.
    ///
    /// The transport never calls it twice without a [`VirtioDevice::reset`] or [`VirtioDevice::quiesce`] in between.
    ///
    /// # Errors
    /// A required queue is missing or the kernel refuses a resource. The transport then sets DEVICE_NEEDS_RESET.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;
    /// Stops every worker and drops the queues; when it returns the device no longer touches guest
    /// memory. Requests in flight are completed or dropped, and the device is in its initial state (section 2.4).
    /// Idempotent.
    fn reset(&mut self);
    /// Like [`VirtioDevice::reset`], but loses nothing: requests in flight are completed, and the queues
    /// are returned, so that [`VirtioDevice::activate`] with them continues where it stopped. Returns `None` if the
    /// device is not active.
    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>>;
    /// From the next activation on, marks in `log` the pages that the kernel writes for the device by itself, as vhost
    /// does; with `None`, no longer. The device is not active.
    fn log_pages(&mut self, _log: Option<&Arc<PageLog>>) {}
    /// All that the device holds beside the transport's registers and the queues, as far as the driver or the host's
    /// end can tell. The device is not active.
    ///
    /// # Errors
    /// The device holds what cannot be saved, or cannot be saved at all.
    fn save(&mut self) -> Result<ComponentState, SaveError> {
        Err(SaveError::Refused("this kind of device cannot be saved".into()))
    }
    /// Restores a result of [`VirtioDevice::save`], of a device that was built in the same way. The device is not
    /// active. `features` are those that the driver has accepted, 0 before it has; they were offered.
    ///
    /// # Errors
    /// The state does not fit the device, which is unchanged then.
    fn restore(&mut self, _state: &ComponentState, _features: u64) -> Result<(), RestoreError> {
        Err(RestoreError::field(
            "device",
            "this kind of device cannot be restored",
        ))
    }
}

/// The arguments of [`VirtioDevice::activate`].
pub struct Activation {
    /// Guest memory.
    pub mem: GuestMem,
    /// Features both sides accepted.
    pub features: u64,
    /// The queues the driver enabled, in index order. Each was checked to lie in guest memory.
    pub queues: Vec<ActiveQueue>,
    /// Interrupts towards the driver.
    pub interrupt: Arc<dyn VirtioInterrupt>,
}

impl std::fmt::Debug for Activation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Activation")
            .field("features", &self.features)
            .field("queues", &self.queues)
            .finish()
    }
}

/// A virtqueue that a device owns while it is active.
#[derive(Debug)]
pub struct ActiveQueue {
    /// Queue index as the specification numbers them for the device.
    pub index: u16,
    /// The split virtqueue; event-index is already switched as negotiated.
    pub queue: Queue,
    /// Signalled when the driver notifies the queue.
    pub kick: EventFd,
}

impl ActiveQueue {
    /// True if the driver wants an interrupt for the entries added to the used ring since the last call (section
    /// 2.7.7). Also true if the ring is not readable: a spurious interrupt costs less than a lost one.
    pub fn needs_notification(&mut self, mem: &crate::GuestMemMmap) -> bool {
        self.queue.needs_notification(mem).unwrap_or(true)
    }
}

/// Interrupts that a device raises, independent of the transport.
pub trait VirtioInterrupt: Send + Sync {
    /// Used-buffer notification of one queue.
    fn signal_queue(&self, queue: u16);
    /// An eventfd that raises the interrupt of [`VirtioInterrupt::signal_queue`] without this process, for a datapath
    /// in the kernel. `None` if the driver mapped the queue to no vector. The eventfd does not follow a later change
    /// of the mapping. A signal while the vector is masked is delivered once it is unmasked.
    fn queue_event(&self, _queue: u16) -> Option<EventFd> {
        None
    }
    /// Configuration-change notification; also increments the configuration generation.
    fn signal_config(&self);
    /// Sets DEVICE_NEEDS_RESET and notifies the driver (virtio 1.2, section 2.1.2). `reason` is logged.
    fn needs_reset(&self, reason: &str);
}

/// Errors of activation. The driver sees DEVICE_NEEDS_RESET; the text is logged.
#[derive(Debug, thiserror::Error)]
pub enum ActivateError {
    /// The driver enabled a set of queues the device cannot work with.
    #[error("queue {0} is required but not enabled")]
    MissingQueue(u16),
    /// An operating system resource was refused.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}
