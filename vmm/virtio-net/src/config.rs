//! Feature bits and device configuration space (virtio 1.2, sections 5.1.3 and 5.1.4).

use husk_devices::virtio::transport::MAX_QUEUES;
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_GUEST_OFFLOADS, VIRTIO_NET_F_CTRL_MAC_ADDR, VIRTIO_NET_F_CTRL_RX,
    VIRTIO_NET_F_CTRL_RX_EXTRA, VIRTIO_NET_F_CTRL_VLAN, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_ANNOUNCE,
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS,
};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::mac::Mac;

/// Entries of each receive and transmit queue.
pub const QUEUE_SIZE: u16 = 256;

/// Entries of the control queue.
pub const CONTROL_QUEUE_SIZE: u16 = 64;

/// Most queue pairs of a device: with the control queue, all that the transport has vectors for. A tap has more.
pub const MAX_PAIRS: usize = (MAX_QUEUES - 1) / 2;

/// Bytes of `struct virtio_net_config` up to and including the MTU.
pub(crate) const CONFIG_SIZE: usize = 12;

const fn bits<const N: usize>(list: [u32; N]) -> u64 {
    let (mut all, mut at) = (0, 0);
    while at < N {
        all |= 1 << list[at];
        at += 1;
    }
    all
}

/// UDP segmentation offload, which needs Linux 6.2.
const USO: u64 = bits([
    VIRTIO_NET_F_HOST_USO,
    VIRTIO_NET_F_GUEST_USO4,
    VIRTIO_NET_F_GUEST_USO6,
]);

/// Offloads that the driver accepts on receive and can change at run time (section 5.1.6.5.8).
pub(crate) const GUEST_OFFLOADS: u64 = bits([
    VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_ECN,
    VIRTIO_NET_F_GUEST_USO4,
    VIRTIO_NET_F_GUEST_USO6,
]);

/// Features of the datapath, which vhost implements if it is used.
pub(crate) const DATAPATH: u64 = bits([
    VIRTIO_F_VERSION_1,
    VIRTIO_RING_F_INDIRECT_DESC,
    VIRTIO_RING_F_EVENT_IDX,
    VIRTIO_NET_F_MRG_RXBUF,
]);

/// Features offered with every tap.
const ALWAYS: u64 = bits([
    VIRTIO_RING_F_INDIRECT_DESC,
    VIRTIO_RING_F_EVENT_IDX,
    VIRTIO_NET_F_CSUM,
    VIRTIO_NET_F_HOST_TSO4,
    VIRTIO_NET_F_HOST_TSO6,
    VIRTIO_NET_F_HOST_ECN,
    VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_MRG_RXBUF,
    VIRTIO_NET_F_STATUS,
    VIRTIO_NET_F_GUEST_CSUM,
    VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_ECN,
    VIRTIO_NET_F_CTRL_VQ,
    VIRTIO_NET_F_CTRL_RX,
    VIRTIO_NET_F_CTRL_RX_EXTRA,
    VIRTIO_NET_F_CTRL_VLAN,
    VIRTIO_NET_F_CTRL_MAC_ADDR,
    VIRTIO_NET_F_CTRL_GUEST_OFFLOADS,
    VIRTIO_NET_F_GUEST_ANNOUNCE,
]);

/// Features offered, with or without UDP segmentation (`uso`).
pub(crate) fn features(uso: bool, mtu: Option<u16>, pairs: u16) -> u64 {
    let when = |condition: bool, bits: u64| if condition { bits } else { 0 };
    ALWAYS
        | when(uso, USO)
        | when(mtu.is_some(), bits([VIRTIO_NET_F_MTU]))
        | when(pairs > 1, bits([VIRTIO_NET_F_MQ]))
}

/// Configuration space as the driver reads it.
pub(crate) fn space(mac: Mac, status: u16, pairs: u16, mtu: Option<u16>) -> [u8; CONFIG_SIZE] {
    let mut space = [0; CONFIG_SIZE];
    space[..6].copy_from_slice(&mac);
    space[6..8].copy_from_slice(&status.to_le_bytes());
    space[8..10].copy_from_slice(&pairs.to_le_bytes()); // max_virtqueue_pairs
    space[10..].copy_from_slice(&mtu.unwrap_or(0).to_le_bytes());
    space
}

/// Index of the control queue (section 5.1.2): after the pairs, or after one pair if VIRTIO_NET_F_MQ was not
/// negotiated.
pub(crate) fn control_index(features: u64, pairs: u16) -> u16 {
    if features & bits([VIRTIO_NET_F_MQ]) == 0 {
        2
    } else {
        2 * pairs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_follow_the_host() {
        let plain = features(false, None, 1);
        assert_eq!(plain & (USO | 1 << 3 | 1 << 22), 0);
        assert_eq!(plain & 1 << 10, 0, "no GUEST_UFO, which no kernel does any more");
        assert_eq!(features(true, Some(1500), 2) ^ plain, USO | 1 << 3 | 1 << 22);
    }

    #[test]
    fn the_configuration_is_laid_out_as_specified() {
        assert_eq!(
            space([1, 2, 3, 4, 5, 6], 0x0201, 0x0403, Some(9000)),
            [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 0x28, 0x23]
        );
    }

    #[test]
    fn the_control_queue_is_where_the_driver_looks() {
        assert_eq!((control_index(1 << 22, 4), control_index(0, 4)), (8, 2));
    }
}
