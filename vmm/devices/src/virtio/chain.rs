//! Descriptor chains of split virtqueues, with detection of malformed ones (virtio 1.2, section 2.7).

use std::iter;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{DescriptorChain, Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::GuestMemMmap;

/// Most descriptors read of one chain. Drivers may send far fewer.
const MAX_DESCRIPTORS: usize = 1024;
/// Bytes of a descriptor.
const DESCRIPTOR_SIZE: u64 = 16;

/// One descriptor's range of guest memory, not yet checked to exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest-physical address of the first byte.
    pub address: GuestAddress,
    /// Length in bytes; may be 0.
    pub len: u32,
}

/// Errors of a malformed descriptor chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// The chain loops, exceeds the longest allowed chain, or leaves its descriptor table.
    #[error("descriptor chain does not end")]
    Unterminated,
    /// A device-readable descriptor follows a device-writable one (section 2.7.4.2).
    #[error("device-readable descriptor after a device-writable one")]
    Order,
}

/// Replaces the content of `readable` and `writable` with the device-readable and device-writable segments of
/// `chain`.
///
/// # Errors
/// The chain is malformed; the content of the two lists is then unspecified.
pub fn segments(
    chain: DescriptorChain<&GuestMemMmap>,
    readable: &mut Vec<Segment>,
    writable: &mut Vec<Segment>,
) -> Result<(), ChainError> {
    sort(chain, readable, writable)
}

/// As [`segments`], of the chain that begins at descriptor `head` of `queue`: one that the device took from the
/// available ring earlier and has not answered.
///
/// # Errors
/// As [`segments`].
pub fn segments_at(
    queue: &Queue,
    head: u16,
    mem: &GuestMemMmap,
    readable: &mut Vec<Segment>,
    writable: &mut Vec<Segment>,
) -> Result<(), ChainError> {
    sort(descriptors(queue, head, mem), readable, writable)
}

/// The descriptors of a chain, as the iterator of [`DescriptorChain`], which only the available ring can make, returns
/// them.
fn descriptors<'a>(
    queue: &Queue,
    head: u16,
    mem: &'a GuestMemMmap,
) -> impl Iterator<Item = Descriptor> + use<'a> {
    let (mut table, mut size) = (GuestAddress(queue.desc_table()), u32::from(queue.size()));
    let (mut next, mut left, mut total) = (Some(u32::from(head)), size, 0_u32);
    let mut indirect = false;
    iter::from_fn(move || {
        loop {
            let index = next.take().filter(|index| *index < size && left > 0)?;
            let at = table.0.checked_add(u64::from(index) * DESCRIPTOR_SIZE)?;
            let descriptor: Descriptor = mem.read_obj(GuestAddress(at)).ok()?;
            if descriptor.refers_to_indirect_table() {
                // Section 2.7.5.3.1: one level only.
                let len = descriptor.len();
                let entries = len / DESCRIPTOR_SIZE as u32;
                let whole = len.is_multiple_of(DESCRIPTOR_SIZE as u32) && entries <= u32::from(u16::MAX);
                if indirect || !whole {
                    return None;
                }
                (table, size, left, next, indirect) = (descriptor.addr(), entries, entries, Some(0), true);
                continue;
            }
            // Section 2.7.5.2: a chain is shorter than 2^32 bytes.
            total = total.checked_add(descriptor.len())?;
            left -= 1;
            next = descriptor.has_next().then(|| u32::from(descriptor.next()));
            return Some(descriptor);
        }
    })
}

fn sort(
    chain: impl Iterator<Item = Descriptor>,
    readable: &mut Vec<Segment>,
    writable: &mut Vec<Segment>,
) -> Result<(), ChainError> {
    readable.clear();
    writable.clear();
    let mut more = true;
    for (count, descriptor) in chain.enumerate() {
        if count == MAX_DESCRIPTORS {
            return Err(ChainError::Unterminated);
        }
        more = descriptor.has_next();
        let segment = Segment {
            address: descriptor.addr(),
            len: descriptor.len(),
        };
        if descriptor.is_write_only() {
            writable.push(segment);
        } else if writable.is_empty() {
            readable.push(segment);
        } else {
            return Err(ChainError::Order);
        }
    }
    // The iterator stops silently at a loop, at a descriptor outside its table and at a bad indirect table. Then its
    // last descriptor has the NEXT flag, or it returned none.
    if more {
        Err(ChainError::Unterminated)
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use virtio_queue::QueueOwnedT;
    use vm_memory::GuestAddressSpace;

    use super::*;
    use crate::virtio::testing::{Driver, memory};

    const SIZE: u16 = 16;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// A chain that is taken up again has the segments, or the error, that it had when the ring gave it.
        #[test]
        fn a_chain_is_the_same_again(
            table in prop::collection::vec((0..4_u64, 0..5_u32, 0..8_u16, 0..18_u16), 64),
            huge: Option<u8>,
            head in 0..18_u16,
        ) {
            let mem = memory(&[(0, 0x1_0000)]);
            let mut driver = Driver::new(&mem, 0, SIZE, 0x1000);
            for (at, &(address, len, flags, next)) in (0..).zip(&table) {
                let len = if huge == Some(at) { u32::MAX } else { len * 16 };
                let entry = (0x4000 + address * 16, len, flags);
                if at < 16 {
                    driver.put(at.into(), entry, next);
                }
                // The memory that descriptors name, in which indirect tables lie.
                let bytes = [&entry.0.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
                mem.memory().write_slice(&bytes.concat(), GuestAddress(0x4000 + 16 * u64::from(at))).unwrap();
            }
            driver.offer(head);
            let mut queue = driver.queue(false).queue;
            let mem = mem.memory();
            let chain = queue.iter(&*mem).unwrap().next().unwrap();
            prop_assert_eq!(chain.head_index(), head);
            let mut first = (Vec::new(), Vec::new());
            let mut again = (Vec::new(), Vec::new());
            let expected = segments(chain, &mut first.0, &mut first.1);
            let got = segments_at(&queue, head, &mem, &mut again.0, &mut again.1);
            prop_assert_eq!(got, expected);
            prop_assert_eq!(again, first);
        }
    }
}
