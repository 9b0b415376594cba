//! Descriptor chains of split virtqueues, with detection of malformed ones (virtio 1.2, section 2.7).

use std::iter;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, VolatileMemory};

use super::access::GuestSlice;
use crate::GuestMemMmap;

/// Most descriptors read of one chain. Drivers may send far fewer.
const MAX_DESCRIPTORS: usize = 1024;
/// Bytes of a descriptor.
const DESCRIPTOR_SIZE: usize = 16;

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

/// Replaces the content of `readable` and `writable` with the device-readable and device-writable segments of the chain
/// that begins at descriptor `head` of `queue`: one that the device took from the available ring and has not answered.
///
/// # Errors
/// The chain is malformed; the content of the two lists is then unspecified.
pub fn segments(
    queue: &Queue,
    head: u16,
    mem: &GuestMemMmap,
    readable: &mut Vec<Segment>,
    writable: &mut Vec<Segment>,
) -> Result<(), ChainError> {
    readable.clear();
    writable.clear();
    let mut more = true;
    for (count, descriptor) in descriptors(queue, head, mem).enumerate() {
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

/// The descriptors that the iterator of [`virtio_queue::DescriptorChain`] returns. That one searches guest memory for
/// every descriptor, which takes a quarter of a disk request's instructions in this process.
fn descriptors<'a>(
    queue: &Queue,
    head: u16,
    mem: &'a GuestMemMmap,
) -> impl Iterator<Item = Descriptor> + use<'a> {
    let mut table = DescriptorTable::new(mem, GuestAddress(queue.desc_table()), queue.size().into());
    let (mut next, mut left, mut total) = (Some(u32::from(head)), table.entries, 0_u32);
    let mut indirect = false;
    iter::from_fn(move || {
        loop {
            let index = next.take().filter(|_| left > 0)?;
            let descriptor = table.read(index)?;
            if descriptor.refers_to_indirect_table() {
                // Section 2.7.5.3.1: one level only.
                let len = descriptor.len();
                let entries = len / DESCRIPTOR_SIZE as u32;
                let whole = len.is_multiple_of(DESCRIPTOR_SIZE as u32) && entries <= u32::from(u16::MAX);
                if indirect || !whole {
                    return None;
                }
                table = DescriptorTable::new(mem, descriptor.addr(), entries);
                (left, next, indirect) = (entries, Some(0), true);
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

/// A table of descriptors in guest memory.
struct DescriptorTable<'a> {
    mem: &'a GuestMemMmap,
    start: GuestAddress,
    entries: u32,
    /// The whole table, unless a part of it is in another region or outside of memory.
    slice: Option<GuestSlice<'a>>,
}

impl<'a> DescriptorTable<'a> {
    fn new(mem: &'a GuestMemMmap, start: GuestAddress, entries: u32) -> Self {
        let slice = mem.get_slice(start, entries as usize * DESCRIPTOR_SIZE).ok();
        Self {
            mem,
            start,
            entries,
            slice,
        }
    }

    /// The descriptor at `index`, if the table has it and it is in guest memory.
    fn read(&self, index: u32) -> Option<Descriptor> {
        if index >= self.entries {
            return None;
        }
        let at = index as usize * DESCRIPTOR_SIZE;
        match &self.slice {
            Some(slice) => Some(slice.get_ref::<Descriptor>(at).ok()?.load()),
            None => self.mem.read_obj(self.start.checked_add(at as u64)?).ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use virtio_queue::QueueOwnedT;
    use vm_memory::GuestAddressSpace;

    use super::*;
    use crate::virtio::testing::{Driver, WRITE, memory};

    const SIZE: u16 = 16;
    const NEXT: u16 = 1;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// The descriptors are those of virtio-queue, also where tables are in two regions or leave memory.
        #[test]
        fn descriptors_are_those_of_virtio_queue(
            table in prop::collection::vec((0..4_u64, 0..5_u32, 0..8_u16, 0..18_u16), 64),
            huge: Option<u8>,
            head in 0..18_u16,
            end in 0x4000..0x40a0_u64,
            hole: bool,
        ) {
            let second = (end + u64::from(hole) * 0x10, 0x1_0000);
            let mem = memory(&[(0, end as usize), second]);
            let mut driver = Driver::new(&mem, 0, SIZE, 0x1000);
            for (at, &(address, len, flags, next)) in (0..).zip(&table) {
                let len = if huge == Some(at) { u32::MAX } else { len * 16 };
                let entry = (0x4000 + address * 16, len, flags);
                if at < 16 {
                    driver.put(at.into(), entry, next);
                }
                // The memory that descriptors name, in which indirect tables lie.
                let bytes = [&entry.0.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
                // One at the hole is written in part.
                let _ = mem.memory().write_slice(&bytes.concat(), GuestAddress(0x4000 + 16 * u64::from(at)));
            }
            driver.offer(head);
            let mut queue = driver.queue(false).queue;
            let mem = mem.memory();
            let chain = queue.iter(&*mem).unwrap().next().unwrap();
            prop_assert_eq!(chain.head_index(), head);
            let fields = |d: Descriptor| (d.addr(), d.len(), d.flags(), d.next());
            let expected: Vec<_> = chain.map(fields).collect();
            let got: Vec<_> = descriptors(&queue, head, &mem).map(fields).collect();
            prop_assert_eq!(got, expected);
        }
    }

    #[test]
    fn malformed_chains_are_refused() {
        let mem = memory(&[(0, 0x1_0000)]);
        let mut driver = Driver::new(&mem, 0, SIZE, 0x1000);
        let queue = driver.queue(false).queue;
        let mut lists = (Vec::new(), Vec::new());
        let mut parse = |head| segments(&queue, head, &mem.memory(), &mut lists.0, &mut lists.1);
        let head = driver.add(&[(0x8000, 1, 0), (0x9000, 2, WRITE), (0xa000, 3, WRITE)]);
        assert_eq!(parse(head), Ok(()));
        let head = driver.add(&[(0x8000, 1, WRITE), (0x9000, 2, 0)]);
        assert_eq!(parse(head), Err(ChainError::Order));
        driver.put(9, (0x8000, 1, NEXT), 9);
        assert_eq!(parse(9), Err(ChainError::Unterminated));
        assert_eq!(parse(SIZE), Err(ChainError::Unterminated));
    }
}
