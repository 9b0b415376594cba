//! The worker of devices that complete each request synchronously: one thread for all queues of a device.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use husk_seccomp::ThreadRole;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::GuestAddressSpace;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::chain::{Segment, segments};
use super::{Activation, ActiveQueue, VirtioInterrupt};
use crate::worker::Worker;
use crate::{GuestMem, GuestMemMmap};

/// Time after which a worker looks for a stop, beside that of the request it is at.
const PASS_LIMIT: Duration = Duration::from_millis(10);

/// Serves the requests of a device.
pub(crate) trait RequestHandler: Send + 'static {
    /// Serves one request of queue `index`. Returns the bytes written from the start of `writable`.
    ///
    /// # Errors
    /// The reason for which the device needs a reset.
    fn handle(
        &mut self,
        index: u16,
        mem: &GuestMemMmap,
        readable: &[Segment],
        writable: &[Segment],
    ) -> Result<u32, &'static str>;
}

/// A running worker.
#[derive(Debug)]
pub(crate) struct QueueWorker(Worker<Vec<ActiveQueue>>);

impl QueueWorker {
    /// Starts a thread called `name`, confined to its role, that serves every queue of `activation` through `handler`.
    pub fn start(
        role: ThreadRole,
        name: &str,
        handler: impl RequestHandler,
        activation: Activation,
    ) -> io::Result<Self> {
        let Activation {
            mem,
            queues,
            interrupt,
            ..
        } = activation;
        let on_panic = {
            let interrupt = Arc::clone(&interrupt);
            move |message: &str| interrupt.needs_reset(message)
        };
        let (readable, writable) = (Vec::new(), Vec::new());
        let mut server = QueueServer {
            handler,
            mem,
            queues,
            interrupt,
            readable,
            writable,
        };
        let body = move |stop: &EventFd| {
            if let Err(reason) = server.serve(stop) {
                server.interrupt.needs_reset(&reason);
            }
            server.queues
        };
        Worker::spawn(role, name, on_panic, body).map(Self)
    }

    /// Stops the worker after its current request. Returns the queues, or `None` if it panicked.
    pub fn stop(self) -> Option<Vec<ActiveQueue>> {
        self.0.stop().ok()
    }
}

struct QueueServer<H> {
    handler: H,
    mem: GuestMem,
    queues: Vec<ActiveQueue>,
    interrupt: Arc<dyn VirtioInterrupt>,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

impl<H: RequestHandler> QueueServer<H> {
    fn serve(&mut self, stop: &EventFd) -> Result<(), String> {
        let epoll = self.watch(stop).map_err(|e| format!("epoll: {e}"))?;
        let mut events = [EpollEvent::default(); 8];
        // Requests may have arrived before the kick events were watched.
        let mut ready: Vec<usize> = (0..self.queues.len()).collect();
        loop {
            let mut failed = None;
            ready.retain(|&slot| match self.pass(slot) {
                Ok(more) => more,
                Err(reason) => {
                    failed = Some(reason);
                    false
                }
            });
            if let Some(reason) = failed {
                return Err(reason);
            }
            let timeout = if ready.is_empty() { -1 } else { 0 };
            let count = match epoll.wait(timeout, &mut events) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
                Err(e) => return Err(format!("epoll: {e}")),
            };
            for event in &events[..count] {
                let slot = event.data() as usize;
                let Some(queue) = self.queues.get(slot) else {
                    return Ok(());
                };
                let _ = queue.kick.read();
                if !ready.contains(&slot) {
                    ready.push(slot);
                }
            }
        }
    }

    /// Watches the queues under their position, and `stop` under the one after them.
    fn watch(&self, stop: &EventFd) -> io::Result<Epoll> {
        let epoll = Epoll::new()?;
        let kicks = self.queues.iter().map(|queue| &queue.kick);
        for (slot, event) in kicks.chain([stop]).enumerate() {
            let interest = EpollEvent::new(EventSet::IN, slot as u64);
            epoll.ctl(ControlOperation::Add, event.as_raw_fd(), interest)?;
        }
        Ok(epoll)
    }

    /// Serves at most one queue's worth of requests, and only for some time, so that a guest cannot prevent a stop.
    /// Returns true if there are more.
    fn pass(&mut self, slot: usize) -> Result<bool, String> {
        let mem = self.mem.memory();
        let active = &mut self.queues[slot];
        let index = active.index;
        let broken = |error: &dyn std::fmt::Display| format!("queue {index}: {error}");
        active.queue.disable_notification(&*mem).map_err(|e| broken(&e))?;
        let (mut used, mut exhausted) = (false, false);
        let start = Instant::now();
        for _ in 0..active.queue.size() {
            if start.elapsed() >= PASS_LIMIT {
                break;
            }
            let Some(chain) = active.queue.iter(&*mem).map_err(|e| broken(&e))?.next() else {
                exhausted = true;
                break;
            };
            let head = chain.head_index();
            segments(&active.queue, head, &mem, &mut self.readable, &mut self.writable)
                .map_err(|e| broken(&e))?;
            let written = self.handler.handle(index, &mem, &self.readable, &self.writable);
            let written = written.map_err(|e| broken(&e))?;
            active
                .queue
                .add_used(&*mem, head, written)
                .map_err(|e| broken(&e))?;
            used = true;
        }
        if used && active.needs_notification(&mem) {
            self.interrupt.signal_queue(index);
        }
        if !exhausted {
            return Ok(true);
        }
        active.queue.enable_notification(&*mem).map_err(|e| broken(&e))
    }
}
