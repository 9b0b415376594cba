//! Batched updates of the used ring: the index is written once per batch, so that the driver sees all its entries at
//! once. virtio 1.2 requires that of the buffers of one network frame (section 5.1.6.4).

use std::sync::atomic::{Ordering, fence};

use virtio_queue::{Error, Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::access;
use crate::GuestMemMmap;

/// Offset of the entries of a ring, after its flags and its index.
const ENTRIES: u64 = 4;
/// Bytes of an entry of the used ring.
const USED_ENTRY: u64 = 8;
/// `VIRTQ_AVAIL_F_NO_INTERRUPT`
const NO_INTERRUPT: u16 = 1;

/// Entries of one used ring that are written but not yet published.
#[derive(Debug, Default)]
pub struct UsedBatch {
    staged: u16,
}

impl UsedBatch {
    /// Number of entries not yet published.
    #[must_use]
    pub fn len(&self) -> u16 {
        self.staged
    }

    /// True if all entries are published.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.staged == 0
    }

    /// Writes an entry after the staged ones. Only a driver that makes a buffer available again before it is used can
    /// have more of them than the ring has entries; then the first ones are overwritten.
    ///
    /// # Errors
    /// The ring is not in guest memory.
    pub fn stage(&mut self, mem: &GuestMemMmap, queue: &Queue, head: u16, len: u32) -> Result<(), Error> {
        let place = queue.next_used().wrapping_add(self.staged) % queue.size();
        let entry = u64::from(len) << 32 | u64::from(head);
        let at = address(queue.used_ring(), ENTRIES + USED_ENTRY * u64::from(place))?;
        access::write(mem, at, &entry.to_le_bytes())
            .map_err(|_| memory(GuestMemoryError::InvalidGuestAddress(at)))?;
        self.staged += 1;
        Ok(())
    }

    /// Publishes the staged entries. Returns true if the driver wants an interrupt (section 2.7.7.2).
    ///
    /// # Errors
    /// A ring is not in guest memory.
    pub fn publish(&mut self, mem: &GuestMemMmap, queue: &mut Queue) -> Result<bool, Error> {
        let added = std::mem::take(&mut self.staged);
        if added == 0 {
            return Ok(false);
        }
        let next = queue.next_used().wrapping_add(added);
        queue.set_next_used(next);
        mem.store(next.to_le(), address(queue.used_ring(), 2)?, Ordering::Release)
            .map_err(memory)?;
        // Publish the index before reading whether the driver wants an interrupt.
        fence(Ordering::SeqCst);
        if queue.event_idx_enabled() {
            needs_notification(mem, queue, next.wrapping_sub(added), next)
        } else {
            Ok(available(mem, queue, 0)? & NO_INTERRUPT == 0)
        }
    }
}

/// True if the driver wants an interrupt for the used entries from `since` to `until`, by the event index (section
/// 2.7.7.2).
///
/// # Errors
/// The ring of the driver is not in guest memory.
pub fn needs_notification(mem: &GuestMemMmap, queue: &Queue, since: u16, until: u16) -> Result<bool, Error> {
    let event = available(mem, queue, ENTRIES + 2 * u64::from(queue.size()))?;
    Ok(until.wrapping_sub(event).wrapping_sub(1) < until.wrapping_sub(since))
}

/// A field of the ring that the driver writes.
fn available(mem: &GuestMemMmap, queue: &Queue, offset: u64) -> Result<u16, Error> {
    let at = address(queue.avail_ring(), offset)?;
    mem.load(at, Ordering::Relaxed).map(u16::from_le).map_err(memory)
}

fn address(ring: u64, offset: u64) -> Result<GuestAddress, Error> {
    ring.checked_add(offset)
        .map(GuestAddress)
        .ok_or(Error::AddressOverflow)
}

fn memory(error: GuestMemoryError) -> Error {
    Error::GuestMemory(error)
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddressSpace;

    use super::*;
    use crate::virtio::testing::{Driver, memory};

    #[test]
    fn a_batch_is_published_at_once() {
        let mem = memory(&[(0, 0x10000)]);
        let mut driver = Driver::new(&mem, 0, 4, 0x1000);
        let mut queue = driver.queue(false).queue;
        let mut used = UsedBatch::default();
        for round in 0..5_u16 {
            for head in 0..3 {
                used.stage(&mem.memory(), &queue, head, u32::from(round * 10 + head))
                    .unwrap();
            }
            assert_eq!((used.len(), driver.used()), (3, None));
            assert!(used.publish(&mem.memory(), &mut queue).unwrap());
            for head in 0..3 {
                assert_eq!(driver.used(), Some((head, u32::from(round * 10 + head))));
            }
        }
        assert!(
            !used.publish(&mem.memory(), &mut queue).unwrap(),
            "nothing to tell"
        );
        // VIRTQ_AVAIL_F_NO_INTERRUPT, in a ring after four descriptors.
        mem.memory().write_obj(1_u16, GuestAddress(0x1040)).unwrap();
        used.stage(&mem.memory(), &queue, 0, 0).unwrap();
        assert!(!used.publish(&mem.memory(), &mut queue).unwrap());
    }

    #[test]
    fn an_event_anywhere_in_the_batch_is_seen() {
        let mem = memory(&[(0, 0x10000)]);
        let driver = Driver::new(&mem, 0, 8, 0x1000);
        let mut queue = driver.queue(true).queue;
        queue.set_next_used(0xfffe);
        let mut used = UsedBatch::default();
        // The batch fills 0xfffe to 1.
        for (event, expected) in [(0xfffd, false), (0xfffe, true), (1, true), (2, false)] {
            driver.set_used_event(event);
            queue.set_next_used(0xfffe);
            for head in 0..4 {
                used.stage(&mem.memory(), &queue, head, 0).unwrap();
            }
            assert_eq!(
                used.publish(&mem.memory(), &mut queue).unwrap(),
                expected,
                "{event}"
            );
        }
    }
}
