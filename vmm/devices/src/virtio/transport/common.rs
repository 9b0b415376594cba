//! The common configuration structure (virtio 1.2, section 4.1.4.3): registers, negotiation, status.

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

use super::interrupt::{TransportInterrupt, status};
use super::state::{CommonState, QueueRegisters, RingState};
use crate::component::{RestoreError, check};

/// Bytes of the structure: up to and including `queue_reset`.
pub(super) const SIZE: u32 = 0x3c;

const DEVICE_FEATURE_SELECT: u64 = 0x00;
const DRIVER_FEATURE_SELECT: u64 = 0x08;
const DRIVER_FEATURE: u64 = 0x0c;
const CONFIG_VECTOR: u64 = 0x10;
const DEVICE_STATUS: u64 = 0x14;
const QUEUE_SELECT: u64 = 0x16;
const QUEUE_SIZE: u64 = 0x18;
const QUEUE_VECTOR: u64 = 0x1a;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_ADDRESSES: std::ops::Range<u64> = 0x20..0x38;

const DRIVER_STATUS: u8 =
    status::ACKNOWLEDGE | status::DRIVER | status::DRIVER_OK | status::FEATURES_OK | status::FAILED;

/// A transition that a status write requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StatusChange {
    /// The driver wrote 0 to device status.
    Reset,
    /// The driver set DRIVER_OK.
    Start,
}

/// The structure's registers, except status, generation and vectors, which [`TransportInterrupt`] holds.
#[derive(Debug)]
pub(super) struct CommonConfig {
    offered: u64,
    max_sizes: Box<[u16]>,
    state: CommonState,
}

impl CommonConfig {
    pub fn new(features: u64, max_sizes: &[u16]) -> Self {
        let offered = features | 1 << VIRTIO_F_VERSION_1;
        let mut common = Self {
            offered,
            max_sizes: max_sizes.into(),
            state: CommonState::default(),
        };
        common.reset();
        common
    }

    pub fn reset(&mut self) {
        let queue = |&size| QueueRegisters {
            size,
            enabled: false,
            desc: 0,
            driver: 0,
            device: 0,
        };
        self.state = CommonState {
            queues: self.max_sizes.iter().map(queue).collect(),
            ..Default::default()
        };
    }

    pub fn state(&self) -> &CommonState {
        &self.state
    }

    /// Checks that a saved state fits this device and the status that was saved with it.
    pub fn check(&self, state: &CommonState, saved_status: u8) -> Result<(), RestoreError> {
        let same = state.queues.len() == self.max_sizes.len();
        check(same, "common.queues", "has another number of queues")?;
        let sizes = state.queues.iter().zip(&self.max_sizes);
        let valid =
            |(queue, max): (&QueueRegisters, &u16)| queue.size.is_power_of_two() && queue.size <= *max;
        let valid = sizes.into_iter().all(valid);
        check(valid, "common.queues", "has a size that the queue cannot have")?;
        let known = saved_status & !(DRIVER_STATUS | status::NEEDS_RESET) == 0;
        check(known, "status", "has an unknown bit")?;
        let negotiated = saved_status & status::FEATURES_OK != 0;
        let ready = saved_status & status::DRIVER_OK != 0;
        check(
            negotiated || !ready,
            "status",
            "has DRIVER_OK without FEATURES_OK",
        )?;
        let offered = !negotiated || self.acceptable(&state.driver_features);
        check(
            offered,
            "common.driver_features",
            "has features that the device does not offer",
        )
    }

    /// Restores a state that passed [`CommonConfig::check`].
    pub fn load(&mut self, state: &CommonState) {
        self.state = state.clone();
    }

    /// The features both sides accepted.
    pub fn features(&self) -> u64 {
        self.state.features()
    }

    pub fn max_size(&self, queue: u16) -> Option<u16> {
        self.max_sizes.get(usize::from(queue)).copied()
    }

    /// The enabled queues, as yet unused.
    pub fn rings(&self) -> Vec<RingState> {
        self.state.rings()
    }

    /// A read of any width at any offset; unimplemented registers read as zero. Reading has no side effects.
    pub fn read(&self, offset: u64, data: &mut [u8], interrupt: &TransportInterrupt) {
        let image = self.image(interrupt);
        data.fill(0);
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(image.len());
        let bytes = &image[from..];
        let len = bytes.len().min(data.len());
        data[..len].copy_from_slice(&bytes[..len]);
    }

    fn image(&self, interrupt: &TransportInterrupt) -> [u8; SIZE as usize] {
        let state = &self.state;
        let selected = usize::from(state.queue_select);
        // A queue that does not exist shows size 0 (section 4.1.4.3.1).
        let none = QueueRegisters {
            size: 0,
            enabled: false,
            desc: 0,
            driver: 0,
            device: 0,
        };
        let queue = state.queues.get(selected).unwrap_or(&none);
        let offered = match state.device_feature_select {
            0 => self.offered as u32,
            1 => (self.offered >> 32) as u32,
            _ => 0,
        };
        let accepted = state.driver_features.get(state.driver_feature_select as usize);
        let notify_offset = if selected < state.queues.len() {
            state.queue_select
        } else {
            0
        };

        let mut image = [0; SIZE as usize];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            image[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&state.device_feature_select.to_le_bytes());
        put(&offered.to_le_bytes());
        put(&state.driver_feature_select.to_le_bytes());
        put(&accepted.unwrap_or(&0).to_le_bytes());
        put(&interrupt.config_vector().to_le_bytes());
        put(&(state.queues.len() as u16).to_le_bytes());
        put(&[interrupt.status(), interrupt.generation()]);
        put(&state.queue_select.to_le_bytes());
        put(&queue.size.to_le_bytes());
        put(&interrupt.queue_vector(selected).to_le_bytes());
        put(&u16::from(queue.enabled).to_le_bytes());
        put(&notify_offset.to_le_bytes());
        put(&queue.desc.to_le_bytes());
        put(&queue.driver.to_le_bytes());
        put(&queue.device.to_le_bytes());
        image
    }

    /// A write. Each register takes its own width only, the 64-bit addresses also their halves (section
    /// 4.1.3.1); everything else is ignored.
    pub fn write(
        &mut self,
        offset: u64,
        data: &[u8],
        interrupt: &TransportInterrupt,
    ) -> Option<StatusChange> {
        match *data {
            [value] if offset == DEVICE_STATUS => return self.write_status(value, interrupt),
            [a, b] => self.write_word(offset, u16::from_le_bytes([a, b]), interrupt),
            [a, b, c, d] => {
                let value = u32::from_le_bytes([a, b, c, d]);
                match offset {
                    DEVICE_FEATURE_SELECT => self.state.device_feature_select = value,
                    DRIVER_FEATURE_SELECT => self.state.driver_feature_select = value,
                    DRIVER_FEATURE => self.accept(value, interrupt),
                    _ => self.write_address(offset, value, interrupt),
                }
            }
            [a, b, c, d, e, f, g, h] => {
                self.write_address(offset, u32::from_le_bytes([a, b, c, d]), interrupt);
                self.write_address(
                    offset.saturating_add(4),
                    u32::from_le_bytes([e, f, g, h]),
                    interrupt,
                );
            }
            _ => {}
        }
        None
    }

    fn write_word(&mut self, offset: u64, value: u16, interrupt: &TransportInterrupt) {
        let selected = usize::from(self.state.queue_select);
        match offset {
            CONFIG_VECTOR => interrupt.map_config(value),
            QUEUE_SELECT => self.state.queue_select = value,
            QUEUE_VECTOR => interrupt.map_queue(selected, value),
            QUEUE_SIZE => {
                let max = self.max_sizes.get(selected).copied().unwrap_or(0);
                if let Some(queue) = self.configurable_queue(interrupt)
                    && value.is_power_of_two()
                    && value <= max
                {
                    queue.size = value;
                }
            }
            // The driver must not write 0 (section 4.1.4.3.2).
            QUEUE_ENABLE => {
                if let Some(queue) = self.configurable_queue(interrupt) {
                    queue.enabled = value == 1;
                }
            }
            _ => {}
        }
    }

    /// One half of one of the three ring addresses of the selected queue.
    fn write_address(&mut self, offset: u64, value: u32, interrupt: &TransportInterrupt) {
        if !QUEUE_ADDRESSES.contains(&offset) || !offset.is_multiple_of(4) {
            return;
        }
        let Some(queue) = self.configurable_queue(interrupt) else {
            return;
        };
        let address = match offset >> 3 {
            4 => &mut queue.desc,
            5 => &mut queue.driver,
            _ => &mut queue.device,
        };
        *address = if offset & 4 == 0 {
            *address >> 32 << 32 | u64::from(value)
        } else {
            u64::from(value) << 32 | *address & u64::from(u32::MAX)
        };
    }

    /// The selected queue, if its configuration may change: not once it is enabled or the driver is ready.
    fn configurable_queue(&mut self, interrupt: &TransportInterrupt) -> Option<&mut QueueRegisters> {
        let queue = self.state.queues.get_mut(usize::from(self.state.queue_select))?;
        (!queue.enabled && !interrupt.has(status::DRIVER_OK)).then_some(queue)
    }

    fn accept(&mut self, value: u32, interrupt: &TransportInterrupt) {
        let select = self.state.driver_feature_select as usize;
        // Section 2.2: no more changes once FEATURES_OK is set.
        if !interrupt.has(status::FEATURES_OK)
            && let Some(features) = self.state.driver_features.get_mut(select)
        {
            *features = value;
        }
    }

    fn acceptable(&self, [low, high, rest @ ..]: &[u32; 4]) -> bool {
        let accepted = u64::from(*high) << 32 | u64::from(*low);
        accepted & !self.offered == 0 && accepted & 1 << VIRTIO_F_VERSION_1 != 0 && *rest == [0, 0]
    }

    /// Section 3.1.1. Bits are only ever added, except by a reset; FEATURES_OK sticks only if the features
    /// are acceptable, DRIVER_OK only after it.
    fn write_status(&mut self, value: u8, interrupt: &TransportInterrupt) -> Option<StatusChange> {
        if value == 0 {
            return Some(StatusChange::Reset);
        }
        let old = interrupt.status();
        let mut new = value & DRIVER_STATUS & !old;
        if !self.acceptable(&self.state.driver_features) {
            new &= !status::FEATURES_OK;
        }
        if (old | new) & status::FEATURES_OK == 0 {
            new &= !status::DRIVER_OK;
        }
        interrupt.set_status(new);
        (new & status::DRIVER_OK != 0).then_some(StatusChange::Start)
    }
}
