//! Feature bits and device configuration space (virtio 1.2, sections 5.2.3 and 5.2.4).

use husk_disk::{Geometry, SECTOR};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::request::MAX_TRANSFER;

/// Entries of each queue, and so the requests it can have in flight. With a data descriptor for each page, a request
/// of 1 MiB fits.
pub const QUEUE_SIZE: u16 = 256;

/// Data descriptors of one request: with the header and the status it fills a queue without indirect tables.
pub(crate) const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;

/// Sectors of one discard or write-zeroes request.
pub(crate) fn max_range_sectors(geometry: &Geometry) -> u32 {
    u32::try_from(geometry.max_discard / SECTOR).unwrap_or(u32::MAX)
}

/// Bytes of `struct virtio_blk_config` up to and including the write-zeroes fields.
pub(crate) const CONFIG_SIZE: usize = 60;

/// Offset of `writeback`, the only field that the driver may write.
pub(crate) const WRITEBACK_OFFSET: u64 = 32;

fn discards(geometry: &Geometry) -> bool {
    !geometry.read_only && !geometry.preallocated
}

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
        bits.push(VIRTIO_BLK_F_WRITE_ZEROES);
    }
    if discards(geometry) {
        bits.push(VIRTIO_BLK_F_DISCARD);
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
    let blocks = |bytes: u32| bytes / geometry.logical_block;
    let range = max_range_sectors(geometry).to_le_bytes();
    let mut space = [0; CONFIG_SIZE];
    let mut put = |offset: usize, bytes: &[u8]| space[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(0, &(geometry.size / SECTOR).to_le_bytes()); // capacity
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &geometry.logical_block.to_le_bytes()); // blk_size
    put(24, &[blocks(geometry.physical_block).ilog2() as u8]); // physical_block_exp
    put(
        25,
        &[u8::try_from(blocks(geometry.alignment_offset)).unwrap_or(0)],
    ); // alignment_offset
    let minimum = u16::try_from(blocks(geometry.minimum_io)).unwrap_or(u16::MAX);
    put(26, &minimum.to_le_bytes()); // min_io_size
    // Linux sends requests of this size. `size_max` would limit them too, but FreeBSD refuses one below 1 MiB.
    let optimal = geometry.optimal_io.min(MAX_TRANSFER as u32);
    put(28, &blocks(optimal).to_le_bytes()); // opt_io_size
    put(WRITEBACK_OFFSET as usize, &[writeback.into()]);
    put(34, &queues.to_le_bytes()); // num_queues
    if discards(geometry) {
        put(36, &range); // max_discard_sectors
        put(40, &1u32.to_le_bytes()); // max_discard_seg
        put(44, &(geometry.discard_granularity / SECTOR as u32).to_le_bytes()); // discard_sector_alignment
    }
    if !geometry.read_only {
        put(48, &range); // max_write_zeroes_sectors
        put(52, &1u32.to_le_bytes()); // max_write_zeroes_seg
        put(56, &[discards(geometry).into()]); // write_zeroes_may_unmap
    }
    space
}

#[cfg(test)]
mod tests {
    use husk_disk::{Disk, DiskOptions};

    use super::*;

    #[test]
    fn the_optimal_transfer_is_one_that_is_served() {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.set_len(1 << 20).unwrap();
        let mut geometry = Disk::open_raw(file.into(), DiskOptions::default())
            .unwrap()
            .geometry();
        for (optimal, blocks) in [(1 << 20, 2048_u32), (64 << 20, 65_536)] {
            geometry.optimal_io = optimal;
            assert_eq!(space(&geometry, 1, true)[28..32], blocks.to_le_bytes());
        }
    }
}
