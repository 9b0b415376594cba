//! Addresses of a queue's rings, for the kernel.

use husk_devices::GuestMemMmap;
use vhost::VringConfigData;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend};

/// VHOST_VRING_F_LOG: vhost marks the pages of the used ring.
const LOG: u32 = 1;

/// Addresses of the parts of a queue, whose writes are logged if `log`. `None` unless each lies in one region: the kernel uses only the host address of
/// the first byte.
pub(crate) fn rings(mem: &GuestMemMmap, queue: &Queue, log: bool) -> Option<VringConfigData> {
    let size = usize::from(queue.size());
    let event = if queue.event_idx_enabled() { 2 } else { 0 };
    let whole = |address: u64, len: usize| {
        let mut slices = GuestMemoryBackend::get_slices(mem, GuestAddress(address), len);
        let first = slices.next()?.ok()?;
        (first.len() == len).then_some(address)
    };
    Some(VringConfigData {
        queue_max_size: queue.max_size(),
        queue_size: queue.size(),
        flags: if log { LOG } else { 0 },
        desc_table_addr: whole(queue.desc_table(), 16 * size)?,
        avail_ring_addr: whole(queue.avail_ring(), 4 + 2 * size + event)?,
        used_ring_addr: whole(queue.used_ring(), 4 + 8 * size + event)?,
        log_addr: log.then_some(queue.used_ring()),
    })
}

#[cfg(test)]
mod tests {
    use husk_devices::virtio::testing::{Driver, memory};
    use vm_memory::GuestAddressSpace;

    use super::*;

    #[test]
    fn a_ring_over_two_regions_is_not_for_the_kernel() {
        let mem = memory(&[(0, 0x2000), (0x2000, 0x2000)]);
        let find = |base| {
            let queue = Driver::new(&mem, 0, 16, base).queue(true).queue;
            rings(&mem.memory(), &queue, false).map(|rings| rings.used_ring_addr)
        };
        assert_eq!(find(0x1000), Some(0x1128));
        assert_eq!(find(0x1e80), None, "used ring");
        assert_eq!(find(0x1ef0), None, "available ring");
        assert_eq!(find(0x1f80), None, "descriptors");
        assert_eq!(find(0x2000), Some(0x2128));

        let queue = Driver::new(&mem, 0, 16, 0x1000).queue(true).queue;
        let logged = rings(&mem.memory(), &queue, true).unwrap();
        assert_eq!((logged.flags, logged.log_addr), (1, Some(0x1128)));
    }
}
