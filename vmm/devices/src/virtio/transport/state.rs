//! Serialized state of a virtio function, for pause and snapshot.

use serde::{Deserialize, Serialize};
use virtio_queue::{Error, Queue, QueueState};

use crate::component::Bytes;
use crate::pci::msix::MsixEntryState;

/// Version of [`TransportState`] that this program writes.
pub const VERSION: u16 = 1;

/// All registers that the driver configured, and the state of the queues.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct TransportState {
    /// Version of the format, [`VERSION`].
    pub version: u16,
    /// Virtio device ID.
    pub device_type: u32,
    /// PCI configuration space.
    pub config_space: Bytes,
    /// Device status.
    pub status: u8,
    /// ISR status.
    pub isr: u8,
    /// Configuration generation.
    pub generation: u8,
    /// The common configuration's registers.
    pub common: CommonState,
    /// Vector of configuration changes.
    pub config_vector: u16,
    /// Vector of each queue.
    pub queue_vectors: Vec<u16>,
    /// MSI-X table.
    pub msix: Vec<MsixEntryState>,
    /// State of the enabled queues; `None` unless the driver is ready and the device works.
    pub rings: Option<Vec<RingState>>,
}

/// Selectors, features and queue registers.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct CommonState {
    /// Selected dword of the device's features.
    pub device_feature_select: u32,
    /// Selected dword of the driver's features.
    pub driver_feature_select: u32,
    /// Features the driver wrote, 128 bits.
    pub driver_features: [u32; 4],
    /// Selected queue.
    pub queue_select: u16,
    /// Each queue's registers.
    pub queues: Vec<QueueRegisters>,
}

/// A queue as the driver configures it (virtio 1.2, section 4.1.4.3).
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct QueueRegisters {
    /// Entries.
    pub size: u16,
    /// True if the driver enabled it.
    pub enabled: bool,
    /// Guest-physical address of the descriptor table.
    pub desc: u64,
    /// Guest-physical address of the available ring.
    pub driver: u64,
    /// Guest-physical address of the used ring.
    pub device: u64,
}

/// A split virtqueue between two activations.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct RingState {
    /// Queue index.
    pub index: u16,
    /// Entries.
    pub size: u16,
    /// Guest-physical address of the descriptor table.
    pub desc: u64,
    /// Guest-physical address of the available ring.
    pub driver: u64,
    /// Guest-physical address of the used ring.
    pub device: u64,
    /// Next available entry to take.
    pub next_avail: u16,
    /// Next used entry to write.
    pub next_used: u16,
}

impl RingState {
    /// The state of an unused ring.
    pub(super) fn fresh(index: u16, registers: &QueueRegisters) -> Self {
        let QueueRegisters {
            size,
            desc,
            driver,
            device,
            ..
        } = *registers;
        Self {
            index,
            size,
            desc,
            driver,
            device,
            next_avail: 0,
            next_used: 0,
        }
    }

    /// The state of a queue that the device returned.
    pub(super) fn of(index: u16, queue: &Queue) -> Self {
        let state = queue.state();
        Self {
            index,
            size: state.size,
            desc: state.desc_table,
            driver: state.avail_ring,
            device: state.used_ring,
            next_avail: state.next_avail,
            next_used: state.next_used,
        }
    }

    /// The queue to give to the device. Fails on sizes and alignments the specification forbids.
    pub(super) fn queue(&self, max_size: u16, event_idx: bool) -> Result<Queue, Error> {
        Queue::try_from(QueueState {
            max_size,
            next_avail: self.next_avail,
            next_used: self.next_used,
            event_idx_enabled: event_idx,
            size: self.size,
            ready: true,
            desc_table: self.desc,
            avail_ring: self.driver,
            used_ring: self.device,
        })
    }
}

/// Errors of restoring a state.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Written by a later version.
    #[error("virtio state has version {0}, this program knows up to {VERSION}")]
    Version(u16),
    /// The state belongs to a device of another kind or with other queues.
    #[error("virtio state belongs to another device: {0} differ")]
    Mismatch(&'static str),
    /// The device is serving its queues; quiesce or reset it first.
    #[error("virtio device is running")]
    Running,
    /// An operating system resource was refused.
    #[error("cannot restore virtio state: {0}")]
    Io(#[from] std::io::Error),
}
