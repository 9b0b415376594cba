//! The loop that serves one virtqueue from one disk queue.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use husk_devices::virtio::chain::Segment;
use husk_devices::virtio::{ActiveQueue, VirtioInterrupt};
use husk_devices::{GuestMem, GuestMemMmap};
use husk_disk::{Completion, DiskQueue, Request};
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::request::{Action, Layout, Rules, Status, mark_dirty};

/// Segments whose memory a finished request keeps for the next one.
const KEPT_SEGMENTS: usize = 64;

const STOP: u64 = 0;
const KICK: u64 = 1;
const DISK: u64 = 2;

/// What a worker leaves behind. The disk queue is gone if it failed.
pub(crate) type Parked = (ActiveQueue, Option<Box<dyn DiskQueue>>);

/// What is wrong when the device cannot go on.
type Broken = String;

/// One virtqueue at work.
pub(crate) struct QueueWorker {
    queue: ActiveQueue,
    // Before `pending`, and so dropped before the memory that it reads and writes.
    disk: Box<dyn DiskQueue>,
    pending: Vec<Pending>,
    /// Tags not in flight. The last freed is used first: its memory is warm.
    free: Vec<u16>,
    layout: Layout,
    mem: GuestMem,
    interrupt: Arc<dyn VirtioInterrupt>,
    rules: Rules,
    /// The cache mode, where the driver chooses it.
    writeback: Option<Arc<AtomicBool>>,
    /// The used ring grew since the driver was last told.
    unsignalled: bool,
    /// A failure of the disk was logged.
    reported: bool,
}

/// A request the disk has.
#[derive(Default)]
struct Pending {
    /// Keeps the memory mapped until the disk is done with it.
    mem: Option<Arc<GuestMemMmap>>,
    head: u16,
    status: GuestAddress,
    /// Bytes of the chain's writable data.
    writable: u32,
    /// Those of them that the disk fills.
    filled: Vec<Segment>,
}

impl QueueWorker {
    pub fn new(
        (queue, disk): (ActiveQueue, Box<dyn DiskQueue>),
        mem: GuestMem,
        interrupt: Arc<dyn VirtioInterrupt>,
        rules: Rules,
        writeback: Option<Arc<AtomicBool>>,
    ) -> Self {
        let depth = disk.depth();
        Self {
            queue,
            disk,
            pending: (0..depth).map(|_| Pending::default()).collect(),
            free: (0..depth).rev().collect(),
            layout: Layout::default(),
            mem,
            interrupt,
            rules,
            writeback,
            unsignalled: false,
            reported: false,
        }
    }

    /// The queue and the disk of a worker that never ran.
    pub fn into_parts(self) -> (ActiveQueue, Box<dyn DiskQueue>) {
        (self.queue, self.disk)
    }

    /// Serves the queue until `stop`, or until it is broken; then completes what is in flight.
    pub fn run(mut self, stop: &EventFd) -> Parked {
        if let Err(reason) = self.serve(stop) {
            self.interrupt.needs_reset(&reason);
        }
        let drained = self.drain();
        if let Err(reason) = &drained {
            self.interrupt.needs_reset(reason);
        }
        (self.queue, drained.is_ok().then_some(self.disk))
    }

    fn serve(&mut self, stop: &EventFd) -> Result<(), Broken> {
        let epoll = self.watch(stop).map_err(|e| format!("epoll: {e}"))?;
        let mut events = [EpollEvent::default(); 3];
        // Whatever was signalled before we came, look first.
        let mut more = true;
        loop {
            if more {
                more = self.pass()?;
            }
            let count = match epoll.wait(if more { 0 } else { -1 }, &mut events) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
                Err(e) => return Err(format!("epoll: {e}")),
            };
            for event in &events[..count] {
                let source = match event.data() {
                    STOP => return Ok(()),
                    KICK => &self.queue.kick,
                    _ => self.disk.event(),
                };
                let _ = source.read();
                more = true;
            }
        }
    }

    fn watch(&self, stop: &EventFd) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        for (event, data) in [(stop, STOP), (&self.queue.kick, KICK), (self.disk.event(), DISK)] {
            epoll.ctl(
                ControlOperation::Add,
                event.as_raw_fd(),
                EpollEvent::new(EventSet::IN, data),
            )?;
        }
        Ok(epoll)
    }

    /// Does what can be done now, with one interrupt for all of it. Returns whether there is more to do
    /// without waiting; it gives up after one queue's worth, so that no guest can keep us from stopping.
    fn pass(&mut self) -> Result<bool, Broken> {
        self.reap()?;
        let mem = self.mem.memory().into_inner();
        self.queue.queue.disable_notification(&*mem).map_err(broken)?;
        let mut exhausted = false;
        for _ in 0..self.queue.queue.size() {
            let Some(tag) = self.free.last().copied() else {
                break;
            };
            let chain = self.queue.queue.iter(&*mem).map_err(broken)?.next();
            let Some(chain) = chain else {
                exhausted = true;
                break;
            };
            self.start(tag, chain, &mem)?;
        }
        self.kick()?;
        self.reap()?;
        self.signal(&mem);
        if exhausted {
            self.queue.queue.enable_notification(&*mem).map_err(broken)
        } else {
            // Without a free tag, a completion brings us back.
            Ok(!self.free.is_empty())
        }
    }

    fn start(
        &mut self,
        tag: u16,
        chain: DescriptorChain<&GuestMemMmap>,
        mem: &Arc<GuestMemMmap>,
    ) -> Result<(), Broken> {
        let head = chain.head_index();
        self.layout.parse(mem, chain).map_err(broken)?;
        let (status, writable) = (self.layout.status(), self.layout.writable_len());
        let mut rules = self.rules;
        if let Some(writeback) = &self.writeback {
            rules.durable |= !writeback.load(Ordering::Relaxed);
        }
        match self.layout.action(mem, &rules) {
            Action::Finish(outcome, written) => {
                self.answer(mem, head, status, outcome, used_len(written, writable))
            }
            Action::Submit(request) => {
                let fills = matches!(request, Request::Read { .. });
                // SAFETY: the tag is free. The buffers are slices of `mem`, which the pending request
                // keeps until its completion; the disk is dropped before the pending requests.
                unsafe { self.disk.submit(tag, request) };
                self.free.pop();
                let pending = &mut self.pending[usize::from(tag)];
                pending.mem = Some(Arc::clone(mem));
                (pending.head, pending.status, pending.writable) = (head, status, writable);
                if fills {
                    self.layout.swap_writable(&mut pending.filled);
                }
                Ok(())
            }
        }
    }

    fn kick(&mut self) -> Result<(), Broken> {
        self.disk.kick().map_err(|e| format!("disk: {e}"))
    }

    /// Answers what the disk is done with, also what it was done with at once.
    fn reap(&mut self) -> Result<(), Broken> {
        loop {
            let mut any = false;
            while let Some(completion) = self.disk.complete() {
                any = true;
                self.finish(completion)?;
            }
            if !any {
                return Ok(());
            }
            self.kick()?;
        }
    }

    fn finish(&mut self, Completion { tag, result }: Completion) -> Result<(), Broken> {
        let pending = &mut self.pending[usize::from(tag)];
        self.free.push(tag);
        let Some(mem) = pending.mem.take() else {
            return Ok(());
        };
        let (head, status, writable) = (pending.head, pending.status, pending.writable);
        // After an error too: some of it may have been filled.
        mark_dirty(&mem, &pending.filled);
        let filled = !pending.filled.is_empty();
        pending.filled.clear();
        pending.filled.shrink_to(KEPT_SEGMENTS);
        let (outcome, written) = match result {
            Ok(()) => (Status::Ok, if filled { writable } else { 0 }),
            Err(error) => {
                // Once is news; a guest that tries again and again shall not fill the log.
                if std::mem::replace(&mut self.reported, true) {
                    tracing::debug!(queue = self.queue.index, %error, "disk request failed");
                } else {
                    tracing::warn!(queue = self.queue.index, %error, "disk request failed");
                }
                (Status::IoError, 0)
            }
        };
        self.answer(&mem, head, status, outcome, used_len(written, writable))
    }

    fn answer(
        &mut self,
        mem: &GuestMemMmap,
        head: u16,
        at: GuestAddress,
        status: Status,
        len: u32,
    ) -> Result<(), Broken> {
        mem.write_obj(status as u8, at).map_err(broken)?;
        self.queue.queue.add_used(mem, head, len).map_err(broken)?;
        self.unsignalled = true;
        Ok(())
    }

    fn signal(&mut self, mem: &GuestMemMmap) {
        if std::mem::take(&mut self.unsignalled) && self.queue.needs_notification(mem) {
            self.interrupt.signal_queue(self.queue.index);
        }
    }

    /// Completes what is in flight and takes nothing new.
    fn drain(&mut self) -> Result<(), Broken> {
        loop {
            // A ring that cannot be written any more loses answers, not our wait for the disk.
            let reaped = self.reap();
            self.kick()?;
            if self.free.len() == self.pending.len() {
                let mem = self.mem.memory();
                self.signal(&mem);
                return Ok(());
            }
            if reaped.is_ok() {
                self.disk.wait();
            }
        }
    }
}

/// Bytes written from the start of the chain's writable part, without a gap (section 2.7.8.2): the
/// status counts only if all data before it was written.
fn used_len(written: u32, writable: u32) -> u32 {
    if written == writable {
        written.saturating_add(1)
    } else {
        written
    }
}

fn broken(error: impl std::fmt::Display) -> Broken {
    error.to_string()
}

#[cfg(test)]
mod tests;
