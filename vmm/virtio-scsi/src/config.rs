//! Device configuration space and features (virtio 1.2, sections 5.6.3 and 5.6.4).

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_bindings::virtio_scsi::{
    VIRTIO_SCSI_CDB_DEFAULT_SIZE, VIRTIO_SCSI_F_CHANGE, VIRTIO_SCSI_F_HOTPLUG, VIRTIO_SCSI_SENSE_DEFAULT_SIZE,
};

use crate::QUEUE_SIZE;
use crate::target::Lun;

/// Bytes of `struct virtio_scsi_config`.
pub(crate) const CONFIG_SIZE: usize = 36;

/// Bytes of `struct virtio_scsi_event`.
pub(crate) const EVENT_SIZE: usize = 16;

/// Maximum data descriptors of one request. With those for header and response it fills a queue without indirect
/// tables.
const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;

/// Maximum sectors of one request that the driver should send, just below the limit of the units, 32 MiB.
const MAX_SECTORS: u32 = 0xffff;

/// Maximum commands to queue for one logical unit.
const CMD_PER_LUN: u32 = 128;

const SENSE_SIZE: u64 = 20;
const CDB_SIZE: u64 = 24;

/// The field sizes that the driver may set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Bytes of a request's CDB field.
    pub cdb: u8,
    /// Bytes of a response's sense field.
    pub sense: u16,
}

impl Sizes {
    /// Sizes after a reset.
    pub const DEFAULT: Self = Self {
        cdb: VIRTIO_SCSI_CDB_DEFAULT_SIZE as u8,
        sense: VIRTIO_SCSI_SENSE_DEFAULT_SIZE as u16,
    };

    /// Handles a driver's write to configuration space. Ignores impossible sizes; the driver sees that when it reads
    /// them back.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        let Ok(value) = data.try_into().map(u32::from_le_bytes) else {
            return;
        };
        match offset {
            SENSE_SIZE => self.sense = value.try_into().unwrap_or(self.sense),
            CDB_SIZE => self.cdb = value.try_into().unwrap_or(self.cdb),
            _ => {}
        }
    }
}

pub(crate) fn features() -> u64 {
    [
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_SCSI_F_HOTPLUG,
        VIRTIO_SCSI_F_CHANGE,
    ]
    .into_iter()
    .fold(0, |all, bit| all | 1 << bit)
}

/// Configuration space as the driver reads it.
pub(crate) fn space(request_queues: u16, max_target: u8, sizes: Sizes) -> [u8; CONFIG_SIZE] {
    let mut space = [0; CONFIG_SIZE];
    let words = [
        request_queues.into(),
        SEG_MAX,
        MAX_SECTORS,
        CMD_PER_LUN,
        EVENT_SIZE as u32,
        sizes.sense.into(),
        sizes.cdb.into(),
        u32::from(max_target) << 16, // max_channel 0, max_target
        u32::from(Lun::COUNT) - 1,   // max_lun
    ];
    for (field, word) in space.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *field = word.to_le_bytes();
    }
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_laid_out_as_specified() {
        let space = space(3, 255, Sizes::DEFAULT);
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| space[at + i]));
        assert_eq!([word(0), word(4), word(8), word(12)], [3, 254, 0xffff, 128]);
        assert_eq!([word(16), word(20), word(24)], [16, 96, 32]);
        assert_eq!(
            (u16::from_le_bytes([space[28], space[29]]), word(32)),
            (0, 16_383)
        );
        assert_eq!(u16::from_le_bytes([space[30], space[31]]), 255);
    }

    #[test]
    fn impossible_sizes_are_ignored() {
        let mut sizes = Sizes::DEFAULT;
        sizes.write(20, &252u32.to_le_bytes());
        sizes.write(24, &16u32.to_le_bytes());
        let taken = Sizes { cdb: 16, sense: 252 };
        assert_eq!(sizes, taken);
        sizes.write(20, &65_536u32.to_le_bytes());
        sizes.write(24, &256u32.to_le_bytes());
        sizes.write(24, &[1, 0]);
        sizes.write(22, &[1, 0, 0, 0]);
        sizes.write(0, &[9, 0, 0, 0]);
        assert_eq!(sizes, taken);
    }
}
