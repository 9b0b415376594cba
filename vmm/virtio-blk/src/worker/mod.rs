//! The worker loop of one virtqueue.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use husk_devices::sched_policy::SchedPolicy;
use husk_devices::virtio::used_batch::UsedBatch;
use husk_devices::virtio::{ActiveQueue, VirtioInterrupt, access};
use husk_devices::{GuestMem, GuestMemMmap};
use husk_disk::{Disk, SECTOR};
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{GuestAddress, GuestAddressSpace};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use crate::queue_io::{FinishedRequest, QueueIo};
use crate::request::{Action, BlkStatus, RequestLayout, RequestLimits};
use crate::setup::OnIoStop;

const STOP: u64 = 0;
const KICK: u64 = 1;
const DISK: u64 = 2;

/// The result of a worker. The queue I/O is `None` if it failed.
pub(crate) type StoppedQueue = (ActiveQueue, Option<QueueIo>);

/// Reason for which the device needs a reset.
type DeviceError = String;

/// State that all workers of an activation share.
#[derive(Clone)]
pub(crate) struct WorkerContext {
    pub mem: GuestMem,
    pub interrupt: Arc<dyn VirtioInterrupt>,
    pub disk: Disk,
    pub limits: RequestLimits,
    /// The cache mode, if the driver chooses it.
    pub writeback: Option<Arc<AtomicBool>>,
    pub on_io_stop: OnIoStop,
}

/// The worker of one virtqueue.
pub(crate) struct QueueWorker {
    queue: ActiveQueue,
    queue_io: QueueIo,
    layout: RequestLayout,
    context: WorkerContext,
    /// Limits during this pass.
    limits: RequestLimits,
    used: UsedBatch,
    /// The driver wants an interrupt for entries that were published.
    unsignalled: bool,
    sched_policy: SchedPolicy,
    /// A failure of the disk was logged.
    reported: bool,
}

impl QueueWorker {
    pub fn new((queue, queue_io): (ActiveQueue, QueueIo), context: WorkerContext) -> Self {
        Self {
            queue,
            queue_io,
            layout: RequestLayout::default(),
            limits: context.limits,
            context,
            used: UsedBatch::default(),
            unsignalled: false,
            sched_policy: SchedPolicy::default(),
            reported: false,
        }
    }

    /// The queue and the I/O engine of a worker that never ran.
    pub fn into_parts(self) -> (ActiveQueue, QueueIo) {
        (self.queue, self.queue_io)
    }

    /// Serves the queue until `stop` or a malformed ring, then completes the requests in flight, except those held
    /// after an I/O error.
    pub fn run(mut self, stop: &EventFd) -> StoppedQueue {
        if let Err(reason) = self.serve(stop) {
            self.context.interrupt.needs_reset(&reason);
        }
        let drained = self.drain();
        if let Err(reason) = &drained {
            self.context.interrupt.needs_reset(reason);
        }
        (self.queue, drained.is_ok().then_some(self.queue_io))
    }

    fn serve(&mut self, stop: &EventFd) -> Result<(), DeviceError> {
        let epoll = self.watch(stop).map_err(|e| format!("epoll: {e}"))?;
        let mut events = [EpollEvent::default(); 3];
        self.queue_io.retry();
        self.start_restored()?;
        // Requests may have arrived before the events were watched.
        let mut more = true;
        loop {
            if more {
                more = self.pass()?;
            }
            match epoll.wait(if more { 0 } else { -1 }, &mut events) {
                Ok(count) if events[..count].iter().any(|event| event.data() == STOP) => return Ok(()),
                Ok(count) => more |= count > 0,
                // io_uring interrupts the wait when it has work to do, such as a completion.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => more = true,
                Err(e) => return Err(format!("epoll: {e}")),
            }
        }
    }

    /// No event is read: kicks are edge-triggered, the engine resets its own event, and the stop event stays set.
    fn watch(&self, stop: &EventFd) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        let engine = self.queue_io.engine().event().as_raw_fd();
        for (fd, events, data) in [
            (stop.as_raw_fd(), EventSet::IN, STOP),
            (
                self.queue.kick.as_raw_fd(),
                EventSet::IN | EventSet::EDGE_TRIGGERED,
                KICK,
            ),
            (engine, EventSet::IN, DISK),
        ] {
            epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(events, data))?;
        }
        Ok(epoll)
    }

    /// Serves at most one queue's worth of requests and completions, so that a guest cannot prevent a stop, with one
    /// interrupt for all. Returns true if there is more to do without waiting.
    fn pass(&mut self) -> Result<bool, DeviceError> {
        self.reap()?;
        self.limits = self.context.current_limits();
        let mem = self.context.mem.memory().into_inner();
        self.queue.queue.disable_notification(&*mem).map_err(broken)?;
        let (mut exhausted, mut found) = (false, 0);
        for _ in 0..self.queue.queue.size() {
            if !self.queue_io.has_room() {
                break;
            }
            let queue = &mut self.queue.queue;
            let Some(chain) = queue.iter(&*mem).map_err(broken)?.next() else {
                exhausted = true;
                break;
            };
            let head = chain.head_index();
            self.layout.parse(&mem, queue, head).map_err(broken)?;
            self.start(head, &mem)?;
            found += 1;
        }
        self.sched_policy.record_pass(found);
        self.kick()?;
        self.reap()?;
        self.signal();
        if exhausted {
            self.queue.queue.enable_notification(&*mem).map_err(broken)
        } else {
            // Without a free tag, the next completion wakes the worker.
            Ok(self.queue_io.has_room())
        }
    }

    /// Starts the requests that were held when the device was saved, as a retry of a held request does.
    fn start_restored(&mut self) -> Result<(), DeviceError> {
        self.limits = self.context.current_limits();
        let mem = self.context.mem.memory().into_inner();
        for head in self.queue_io.take_restored() {
            let queue = &self.queue.queue;
            self.layout.parse(&mem, queue, head).map_err(broken)?;
            self.start(head, &mem)?;
        }
        Ok(())
    }

    /// Starts the request that was parsed last.
    fn start(&mut self, head: u16, mem: &Arc<GuestMemMmap>) -> Result<(), DeviceError> {
        // The driver may have changed the cache mode since the last request.
        self.limits.durable = self.context.durable();
        let (status, writable) = (self.layout.status(), self.layout.writable_len());
        match self.layout.action(mem, &self.limits) {
            Action::Finish(outcome, written) => {
                self.answer(mem, head, status, outcome, used_len(written, writable))
            }
            Action::Submit { request, filled } => {
                // SAFETY: the layout made the buffers from `mem`.
                unsafe {
                    self.queue_io
                        .submit(request, mem, filled, (head, status, writable));
                }
                Ok(())
            }
        }
    }

    fn kick(&mut self) -> Result<(), DeviceError> {
        self.queue_io.kick().map_err(|e| format!("disk: {e}"))
    }

    /// Answers completed requests, including those that completed on submission.
    fn reap(&mut self) -> Result<(), DeviceError> {
        let mut answered = Ok(());
        while answered.is_ok()
            && let Some(finished) = self.queue_io.complete()
        {
            answered = self.finish(finished);
        }
        if !self.used.is_empty() {
            self.publish()?;
        }
        answered?;
        // Submits requests that the engine could not submit before, and reports its failure.
        self.kick()?;
        if let Some(error) = self.queue_io.take_io_stop() {
            tracing::warn!(queue = self.queue.index, %error, "disk request failed and is held");
            (self.context.on_io_stop)(error);
        }
        Ok(())
    }

    fn finish(&mut self, finished: FinishedRequest) -> Result<(), DeviceError> {
        let FinishedRequest {
            mem,
            head,
            status,
            writable,
            filled,
            result,
        } = finished;
        let (outcome, written) = match result {
            Ok(()) => (BlkStatus::Ok, if filled { writable } else { 0 }),
            Err(error) => {
                // Warn once: a guest that retries must not fill the log.
                if std::mem::replace(&mut self.reported, true) {
                    tracing::debug!(queue = self.queue.index, %error, "disk request failed");
                } else {
                    tracing::warn!(queue = self.queue.index, %error, "disk request failed");
                }
                (BlkStatus::IoError, 0)
            }
        };
        self.answer(&mem, head, status, outcome, used_len(written, writable))
    }

    fn answer(
        &mut self,
        mem: &GuestMemMmap,
        head: u16,
        at: GuestAddress,
        status: BlkStatus,
        len: u32,
    ) -> Result<(), DeviceError> {
        access::write(mem, at, &[status as u8]).map_err(broken)?;
        self.used.stage(mem, &self.queue.queue, head, len).map_err(broken)
    }

    /// Shows the driver the answers so far.
    fn publish(&mut self) -> Result<(), DeviceError> {
        let mem = self.context.mem.memory();
        let wanted = self.used.publish(&mem, &mut self.queue.queue).map_err(broken)?;
        self.unsignalled |= wanted;
        Ok(())
    }

    fn signal(&mut self) {
        if std::mem::take(&mut self.unsignalled) {
            self.context.interrupt.signal_queue(self.queue.index);
        }
    }

    /// Completes requests in flight and starts none. Held requests stay held, and those that write zeroes without
    /// `fallocate` are suspended.
    fn drain(&mut self) -> Result<(), DeviceError> {
        self.queue_io.suspend();
        loop {
            // With an unwritable ring answers are lost, but the disk must still finish.
            let reaped = self.reap();
            self.kick()?;
            if !self.queue_io.engine().is_busy() {
                self.signal();
                return Ok(());
            }
            if reaped.is_ok() {
                self.queue_io.engine().wait();
            }
        }
    }
}

impl WorkerContext {
    /// The current limits.
    fn current_limits(&self) -> RequestLimits {
        let mut limits = self.limits;
        limits.capacity = self.disk.size() / SECTOR;
        limits
    }

    /// True if writes must be on stable storage when they complete.
    fn durable(&self) -> bool {
        let writethrough = |writeback: &Arc<AtomicBool>| !writeback.load(Ordering::Relaxed);
        self.limits.durable || self.writeback.as_ref().is_some_and(writethrough)
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

fn broken(error: impl std::fmt::Display) -> DeviceError {
    error.to_string()
}

#[cfg(test)]
mod tests;
