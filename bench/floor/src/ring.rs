//! A virtqueue of the NIC: buffers for system calls, and the used ring.

use anyhow::{Context, Result};
use libc::iovec;
use std::sync::atomic::{Ordering, fence};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Number of descriptors of each queue.
pub const SIZE: u16 = 256;
/// Page size of the legacy interface, to which the used ring is aligned.
const PAGE: u64 = 4096;
const DESCRIPTOR: u64 = 16;
/// Offset of the entries of either ring, after its flags and index.
const ENTRIES: u64 = 4;
const USED_ENTRY: u64 = 8;

/// A chain of descriptors.
#[derive(Debug)]
pub struct Buffer {
    /// Its first descriptor.
    pub head: u16,
    /// Its first byte.
    pub start: GuestAddress,
    /// Number of its parts.
    pub parts: usize,
    /// Number of its bytes.
    pub length: usize,
}

/// A split virtqueue.
#[derive(Debug)]
pub struct Ring {
    queue: Queue,
    memory: GuestMemoryMmap,
    used_event: GuestAddress,
}

impl Ring {
    /// The queue at a page number (virtio 1.2, section 2.7.2).
    pub fn new(memory: GuestMemoryMmap, page: u32, event_idx: bool) -> Result<Self> {
        let descriptors = u64::from(page) * PAGE;
        let available = descriptors + DESCRIPTOR * u64::from(SIZE);
        let used_event = available + ENTRIES + 2 * u64::from(SIZE);
        let used = (used_event + 2).next_multiple_of(PAGE);
        let mut queue = Queue::new(SIZE)?;
        queue.try_set_desc_table_address(GuestAddress(descriptors))?;
        queue.try_set_avail_ring_address(GuestAddress(available))?;
        queue.try_set_used_ring_address(GuestAddress(used))?;
        queue.set_event_idx(event_idx);
        queue.set_ready(true);
        Ok(Self {
            queue,
            memory,
            used_event: GuestAddress(used_event),
        })
    }

    /// Takes the next buffer. Its parts are added to `parts`.
    pub fn pop(&mut self, parts: &mut Vec<iovec>) -> Result<Option<Buffer>> {
        let Some(chain) = self.queue.pop_descriptor_chain(&self.memory) else {
            return Ok(None);
        };
        let mut buffer = Buffer {
            head: chain.head_index(),
            start: GuestAddress(0),
            parts: 0,
            length: 0,
        };
        for descriptor in chain {
            if buffer.parts == 0 {
                buffer.start = descriptor.addr();
            }
            let size = descriptor.len() as usize;
            let slice = self.memory.get_slice(descriptor.addr(), size)?;
            parts.push(iovec {
                iov_base: slice.ptr_guard_mut().as_ptr().cast(),
                iov_len: size,
            });
            buffer.length += size;
            buffer.parts += 1;
        }
        Ok(Some(buffer))
    }

    /// Asks for a notification of the next buffer. Returns true if there is one already.
    pub fn wants_notification(&mut self) -> Result<bool> {
        Ok(self.queue.enable_notification(&self.memory)?)
    }

    /// Gives buffers back, each with the number of bytes that are written to it, and publishes them at once. Returns
    /// true if the driver wants an interrupt (section 2.7.7.2).
    pub fn give_back(&mut self, buffers: &[(u16, u32)]) -> Result<bool> {
        let used = GuestAddress(self.queue.used_ring());
        let since = self.queue.next_used();
        let mut next = since;
        for (head, length) in buffers {
            let entry = u64::from(*length) << 32 | u64::from(*head);
            let place = ENTRIES + USED_ENTRY * u64::from(next % SIZE);
            let at = used.0.checked_add(place).context("the used ring")?;
            self.memory.write_obj(entry, GuestAddress(at))?;
            next = next.wrapping_add(1);
        }
        self.queue.set_next_used(next);
        self.memory
            .store(next, GuestAddress(used.0 + 2), Ordering::Release)?;
        fence(Ordering::SeqCst);
        if !self.queue.event_idx_enabled() {
            return Ok(true);
        }
        let event: u16 = self.memory.load(self.used_event, Ordering::Relaxed)?;
        Ok(next.wrapping_sub(event).wrapping_sub(1) < next.wrapping_sub(since))
    }
}
