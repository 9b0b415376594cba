//! Serialized state of a virtio function.

use serde::{Deserialize, Serialize};
use virtio_queue::{Error, Queue, QueueState};

use crate::component::{Bytes, ComponentState};
use crate::pci::msix::MsixEntryState;

/// All registers that the driver configured, the state of the queues, and the device's own.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct TransportState {
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
    /// All that the device holds beside that.
    pub device: ComponentState,
}

/// Selectors, features and queue registers.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
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

impl CommonState {
    /// The features that the driver wrote.
    pub(super) fn features(&self) -> u64 {
        let [low, high, ..] = self.driver_features;
        u64::from(high) << 32 | u64::from(low)
    }

    /// The enabled queues, as yet unused.
    pub(super) fn rings(&self) -> Vec<RingState> {
        let enabled = (0..).zip(&self.queues).filter(|(_, queue)| queue.enabled);
        enabled
            .map(|(index, queue)| RingState::fresh(index, queue))
            .collect()
    }
}

/// A queue as the driver configures it (virtio 1.2, section 4.1.4.3).
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
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
#[serde(deny_unknown_fields)]
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
