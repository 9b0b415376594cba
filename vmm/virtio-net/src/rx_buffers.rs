//! Receive buffers that the driver made available and that no frame fills yet.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::Arc;

use husk_devices::GuestMemMmap;
use husk_devices::virtio::chain::{self, Segment};
use husk_devices::virtio::dma::{DmaMapping, host_ranges};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress};

use crate::header::HEADER_LEN;

/// Most iovecs of one `readv` or `writev` (`UIO_MAXIOV` is 1024), with one left for this process's own buffer.
pub(crate) const MAX_SLICES: usize = 1023;

/// Reason for which the device needs a reset.
pub(crate) type DeviceError = String;

pub(crate) fn broken(error: impl std::fmt::Display) -> DeviceError {
    error.to_string()
}

/// One descriptor chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RxBuffer {
    pub head: u16,
    /// Length in bytes, at least that of a header.
    pub len: usize,
    slices: usize,
}

/// Parsed buffers in the order of the available ring. They form one range of bytes: offsets count from the first
/// byte of the first buffer.
#[derive(Debug, Default)]
pub(crate) struct RxBuffers {
    /// The memory that `slices` point into.
    mem: Option<Arc<GuestMemMmap>>,
    chains: VecDeque<RxBuffer>,
    /// The iovecs of all chains, from `start` on.
    slices: Vec<libc::iovec>,
    /// The guest memory of each of `slices`.
    segments: Vec<Segment>,
    start: usize,
    room: usize,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

impl RxBuffers {
    /// Size of all buffers in bytes.
    pub fn room(&self) -> usize {
        self.room
    }

    /// The buffers in order.
    pub fn iter(&self) -> impl Iterator<Item = &RxBuffer> {
        self.chains.iter()
    }

    /// Takes buffers from the queue until there is room for `want` bytes. Returns false if the driver must add
    /// buffers first; true also if no more fit.
    ///
    /// # Errors
    /// A buffer is malformed.
    pub fn fill(
        &mut self,
        mem: &Arc<GuestMemMmap>,
        queue: &mut Queue,
        want: usize,
    ) -> Result<bool, DeviceError> {
        if self.mem.as_ref().is_none_or(|held| !Arc::ptr_eq(held, mem)) {
            self.give_back(queue);
            self.mem = Some(Arc::clone(mem));
        }
        // The limit holds also for a driver that makes buffers available again before they are used.
        while self.room < want && self.chains.len() < usize::from(queue.size()) {
            let Some(chain) = queue.iter(&**mem).map_err(broken)?.next() else {
                return Ok(false);
            };
            let head = chain.head_index();
            chain::segments(queue, head, mem, &mut self.readable, &mut self.writable).map_err(broken)?;
            if !self.push(mem, head)? {
                queue.go_to_previous_position();
                break;
            }
        }
        Ok(true)
    }

    /// Adds the chain parsed last. Returns false if one `readv` cannot take its slices too.
    fn push(&mut self, mem: &GuestMemMmap, head: u16) -> Result<bool, DeviceError> {
        if !self.readable.is_empty() {
            return Err("device-readable descriptor in a receive chain".into());
        }
        let (before, mut len) = (self.slices.len(), 0);
        for segment in self.writable.drain(..) {
            let mapped = host_ranges(mem, segment, |address, range| {
                len += range.len;
                self.slices.push(range.into());
                // Part of a segment, whose length is 32 bits.
                let len = range.len as u32;
                self.segments.push(Segment { address, len });
            });
            mapped.map_err(|_| "receive buffer outside of guest memory")?;
        }
        let slices = self.slices.len() - before;
        if len < HEADER_LEN || slices > MAX_SLICES {
            return Err("receive buffer too small for a header, or in too many pieces".into());
        }
        if self.slices.len() - self.start > MAX_SLICES {
            self.slices.truncate(before);
            self.segments.truncate(before);
            return Ok(false);
        }
        self.room += len;
        self.chains.push_back(RxBuffer { head, len, slices });
        Ok(true)
    }

    /// Reads a frame with `read` into the slices of the first buffers, as many as hold `want` bytes, and into `spill`
    /// after them. Marks what was written to guest memory dirty. Returns the result of `read`, which is the number of
    /// bytes read, and the size of those buffers in bytes.
    pub fn read_frame(
        &mut self,
        want: usize,
        spill: libc::iovec,
        read: impl FnOnce(&[libc::iovec]) -> io::Result<usize>,
    ) -> (io::Result<usize>, usize) {
        let (mut end, mut len) = (self.start, 0);
        for chain in &self.chains {
            if len >= want {
                break;
            }
            len += chain.len;
            end += chain.slices;
        }
        let next = self.slices.get_mut(end);
        let covered = next.map(|slice| std::mem::replace(slice, spill));
        if covered.is_none() {
            self.slices.push(spill);
        }
        let mut dma = self
            .mem
            .as_deref()
            .map(|mem| DmaMapping::writable(mem, &self.segments[self.start..end]));
        let result = read(&self.slices[self.start..=end]);
        if let Some(mut dma) = dma.take() {
            match &result {
                Ok(bytes) => dma.set_written(*bytes as u64),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    dma.set_written(0);
                }
                // The kernel may have written before it failed.
                Err(_) => {}
            }
        }
        match covered {
            Some(slice) => self.slices[end] = slice,
            None => {
                self.slices.pop();
            }
        }
        (result, len)
    }

    /// Index of the slice with the byte at `offset`, and the offset inside the slice.
    fn locate(&self, mut offset: usize) -> Option<(usize, usize)> {
        for (index, slice) in self.slices.iter().enumerate().skip(self.start) {
            if offset < slice.iov_len {
                return Some((index, offset));
            }
            offset -= slice.iov_len;
        }
        None
    }

    /// Calls `each` with the guest address of each piece of the `len` bytes at `offset`, and the range of these bytes
    /// that it holds.
    fn walk(&self, offset: usize, len: usize, mut each: impl FnMut(GuestAddress, std::ops::Range<usize>)) {
        let Some((mut index, mut skip)) = self.locate(offset) else {
            return;
        };
        let mut done = 0;
        while done < len {
            let Some(slice) = self.slices.get(index) else {
                return;
            };
            let here = (slice.iov_len - skip).min(len - done);
            each(
                self.segments[index].address.unchecked_add(skip as u64),
                done..done + here,
            );
            done += here;
            (index, skip) = (index + 1, 0);
        }
    }

    /// Reads `bytes` at `offset`, as far as there are buffers.
    pub fn peek(&self, offset: usize, bytes: &mut [u8]) {
        if let Some(mem) = &self.mem {
            self.walk(offset, bytes.len(), |address, part| {
                // Every slice was found in this memory.
                let _ = mem.read_slice(&mut bytes[part], address);
            });
        }
    }

    /// Writes `bytes` at `offset`, as far as there are buffers.
    pub fn put(&mut self, offset: usize, bytes: &[u8]) {
        if let Some(mem) = &self.mem {
            self.walk(offset, bytes.len(), |address, part| {
                // Every slice was found in this memory.
                let _ = mem.write_slice(&bytes[part], address);
            });
        }
    }

    /// Removes the first buffer.
    pub fn pop(&mut self) -> Option<RxBuffer> {
        let chain = self.chains.pop_front()?;
        self.room -= chain.len;
        self.start += chain.slices;
        if self.start > MAX_SLICES || self.chains.is_empty() {
            self.slices.drain(..self.start);
            self.segments.drain(..self.start);
            self.start = 0;
        }
        Some(chain)
    }

    /// Returns all buffers to the queue.
    pub fn give_back(&mut self, queue: &mut Queue) {
        let count = self.chains.len() as u16;
        queue.set_next_avail(queue.next_avail().wrapping_sub(count));
        self.chains.clear();
        self.slices.clear();
        self.segments.clear();
        (self.start, self.room, self.mem) = (0, 0, None);
    }
}
