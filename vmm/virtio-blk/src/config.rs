//! Device configuration space and the feature bits that say which of it is there (sections 5.2.3, 5.2.4).

use husk_disk::{Geometry, SECTOR};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::QUEUE_SIZE;

/// Data descriptors of one request: with the header and the status it fills a queue without indirect tables.
pub(crate) const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;

/// Sectors of one discard or write-zeroes request: 1 GiB.
pub(crate) const MAX_RANGE_SECTORS: u32 = (1 << 30) / SECTOR as u32;

/// Bytes of `struct virtio_blk_config` up to and including the write-zeroes fields.
pub(crate) const CONFIG_SIZE: usize = 60;

/// Where the one field is that the driver may write.
pub(crate) const WRITEBACK_OFFSET: u64 = 32;

pub(crate) fn features(geometry: &Geometry, queues: u16) -> u64 {
    let mut bits = vec![
        VIRTIO_RING_F_INDIRECT_DESC,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_TOPOLOGY,
    ];
    if geometry.read_only {
        bits.push(VIRTIO_BLK_F_RO);
    } else {
        bits.extend([VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES]);
    }
    if geometry.write_cache {
        bits.extend([VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_CONFIG_WCE]);
    }
    if queues > 1 {
        bits.push(VIRTIO_BLK_F_MQ);
    }
    bits.into_iter().fold(0, |all, bit| all | 1 << bit)
}

/// Configuration space as the driver reads it, with `writeback` as the cache mode in force.
pub(crate) fn space(geometry: &Geometry, queues: u16, writeback: bool) -> [u8; CONFIG_SIZE] {
    let blocks_per_physical = geometry.physical_block / geometry.logical_block;
    let sectors_per_physical = geometry.physical_block / SECTOR as u32;
    let mut space = [0; CONFIG_SIZE];
    let mut put = |offset: usize, bytes: &[u8]| space[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(0, &(geometry.size / SECTOR).to_le_bytes()); // capacity
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &geometry.logical_block.to_le_bytes()); // blk_size
    put(24, &[blocks_per_physical.ilog2() as u8, 0]); // physical_block_exp, alignment_offset
    put(
        26,
        &(blocks_per_physical.min(u32::from(u16::MAX)) as u16).to_le_bytes(),
    ); // min_io_size
    put(WRITEBACK_OFFSET as usize, &[writeback.into()]);
    put(34, &queues.to_le_bytes()); // num_queues
    if !geometry.read_only {
        put(36, &MAX_RANGE_SECTORS.to_le_bytes()); // max_discard_sectors
        put(40, &1u32.to_le_bytes()); // max_discard_seg
        put(44, &sectors_per_physical.to_le_bytes()); // discard_sector_alignment
        put(48, &MAX_RANGE_SECTORS.to_le_bytes()); // max_write_zeroes_sectors
        put(52, &1u32.to_le_bytes()); // max_write_zeroes_seg
        put(56, &[1]); // write_zeroes_may_unmap
    }
    space
}
