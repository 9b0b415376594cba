//! The I/O engine of one virtqueue and its requests in flight.
//!
//! It outlives the worker: a request that is held after an I/O error waits here from a pause to the next activation.

use std::io;
use std::sync::Arc;

use husk_devices::GuestMemMmap;
use husk_devices::virtio::chain::Segment;
use husk_devices::virtio::dma::DmaMapping;
use husk_disk::{Disk, DiskId, Engine, ErrorPolicy, IoRequest};
use vm_memory::GuestAddress;

/// Segments whose allocation a finished request keeps for the next one.
const SPARE_SEGMENTS: usize = 64;

#[derive(Debug)]
pub(crate) struct QueueIo {
    // Before `pending`, and so dropped before the memory that it reads and writes.
    engine: Engine,
    disk: DiskId,
    /// By tag, up to the highest tag used.
    pending: Vec<PendingRequest>,
    /// Order of the last request.
    last_order: u64,
    /// Chains that were held when the device was saved, in the order of their arrival. The next worker starts them
    /// again.
    restored: Vec<u16>,
    /// Free tags. The last freed is used first: its memory is in the cache.
    free: Vec<u16>,
}

/// A request in flight.
#[derive(Debug, Default)]
pub(crate) struct PendingRequest {
    /// The segments that the disk fills, and the memory they are in, until the disk has finished with it.
    dma: Option<DmaMapping<Arc<GuestMemMmap>, Vec<Segment>>>,
    /// An empty list for the next request, whose allocation is reused.
    spare: Vec<Segment>,
    pub head: u16,
    pub status: GuestAddress,
    /// Bytes of the chain's device-writable data.
    pub writable: u32,
    /// Increases from request to request.
    order: u64,
}

/// A completed request.
pub(crate) struct FinishedRequest {
    pub mem: Arc<GuestMemMmap>,
    pub head: u16,
    pub status: GuestAddress,
    /// Bytes of the chain's writable data.
    pub writable: u32,
    /// The disk filled all of them, unless `result` is an error.
    pub filled: bool,
    pub result: io::Result<()>,
}

impl QueueIo {
    /// The engine of one queue of `disk`.
    pub fn new(mut engine: Engine, disk: &Disk) -> io::Result<Self> {
        let disk = engine.attach(disk)?;
        let free = (0..engine.depth()).rev().collect();
        Ok(Self {
            engine,
            disk,
            pending: Vec::new(),
            last_order: 0,
            restored: Vec::new(),
            free,
        })
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// True if a request can be submitted.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Submits a request. There is [room](QueueIo::has_room). `filled` are the
    /// segments that a read fills, which it exchanges for an empty list.
    ///
    /// # Safety
    /// The request's buffers are slices of `mem`.
    pub unsafe fn submit(
        &mut self,
        request: IoRequest<'_>,
        mem: &Arc<GuestMemMmap>,
        filled: Option<&mut Vec<Segment>>,
        (head, status, writable): (u16, GuestAddress, u32),
    ) {
        let Some(tag) = self.free.pop() else { return };
        let index = usize::from(tag);
        if self.pending.len() <= index {
            self.pending.resize_with(index + 1, PendingRequest::default);
        }
        let pending = &mut self.pending[index];
        let mut segments = std::mem::take(&mut pending.spare);
        if let Some(filled) = filled {
            std::mem::swap(filled, &mut segments);
        }
        pending.dma = Some(DmaMapping::writable(Arc::clone(mem), segments));
        (pending.head, pending.status, pending.writable) = (head, status, writable);
        self.last_order += 1;
        pending.order = self.last_order;
        // SAFETY: the tag is free. The buffers are slices of `mem`, which the pending request keeps until its
        // completion; the engine is dropped before the pending requests.
        unsafe { self.engine.submit(tag, self.disk, request) };
    }

    pub fn kick(&mut self) -> io::Result<()> {
        self.engine.kick()
    }

    /// The next completed request.
    pub fn complete(&mut self) -> Option<FinishedRequest> {
        loop {
            let completion = self.engine.complete()?;
            let pending = &mut self.pending[usize::from(completion.tag)];
            self.free.push(completion.tag);
            let Some(dma) = pending.dma.take() else {
                continue;
            };
            // Marks the segments dirty after an error too: the disk may have filled some of them.
            let (mem, mut segments) = dma.finish();
            let filled = !segments.is_empty();
            segments.clear();
            segments.shrink_to(SPARE_SEGMENTS);
            pending.spare = segments;
            return Some(FinishedRequest {
                mem,
                head: pending.head,
                status: pending.status,
                writable: pending.writable,
                filled,
                result: completion.result,
            });
        }
    }

    /// The error for which the disk began to hold requests; returned once.
    pub fn take_io_stop(&mut self) -> Option<io::Error> {
        self.engine.take_stopped().map(|stopped| stopped.error)
    }

    /// Keeps requests that write zeroes without `fallocate` until [`QueueIo::retry`].
    pub fn suspend(&mut self) {
        self.engine.suspend_zeroing();
    }

    /// Retries held requests, and continues suspended ones. The caller then calls [`QueueIo::kick`].
    pub fn retry(&mut self) {
        self.engine.resume_zeroing();
        self.engine.retry_held(self.disk);
    }

    /// The chains whose requests are held or suspended, in the order of their arrival. Nothing else is in flight.
    pub fn held(&self) -> Vec<u16> {
        let in_flight = self.pending.iter().filter(|pending| pending.dma.is_some());
        let mut held: Vec<_> = in_flight.map(|pending| (pending.order, pending.head)).collect();
        held.sort_unstable();
        let held = held.into_iter().map(|(_, head)| head);
        self.restored.iter().copied().chain(held).collect()
    }

    /// Sets the chains that the next worker starts again, at most as many as there are tags.
    pub fn restore(&mut self, held: Vec<u16>) {
        self.restored = held;
    }

    /// Takes the chains to start again.
    pub fn take_restored(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.restored)
    }

    /// Drops every request, after waiting for those in flight.
    ///
    /// # Errors
    /// The engine failed. The caller drops this queue I/O.
    pub fn abandon(&mut self) -> io::Result<()> {
        self.restored.clear();
        let policy = self.engine.disk(self.disk).map(Disk::error_policy);
        self.engine.set_error_policy(self.disk, ErrorPolicy::Report)?;
        let in_flight = (0..)
            .zip(&self.pending)
            .filter(|(_, pending)| pending.dma.is_some());
        let tags: Vec<u16> = in_flight.map(|(tag, _)| tag).collect();
        self.engine.abandon_zeroing(&tags);
        self.engine.fail_held(self.disk);
        loop {
            while self.complete().is_some() {}
            self.engine.kick()?;
            if self.engine.in_flight(self.disk) == 0 {
                break;
            }
            self.engine.wait();
        }
        self.engine
            .set_error_policy(self.disk, policy.unwrap_or_default())
    }
}
