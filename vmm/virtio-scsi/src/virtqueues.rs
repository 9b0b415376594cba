//! The driver's memory, interrupt and virtqueues, from activation to reset. Without the queues while quiesced.

use std::sync::Arc;

use husk_devices::virtio::used_batch::UsedBatch;
use husk_devices::virtio::{ActiveQueue, VirtioInterrupt};
use husk_devices::{GuestMem, GuestMemMmap};
use vm_memory::GuestAddressSpace;

use crate::config::Sizes;

/// Index of the control queue.
pub(crate) const CONTROL: u16 = 0;
/// Index of the event queue.
pub(crate) const EVENT: u16 = 1;
/// Index of the first request queue.
pub(crate) const REQUEST: u16 = 2;

/// Queues, guest memory and interrupt that the transport hands over at activation.
pub(crate) struct Driver {
    pub mem: GuestMem,
    pub interrupt: Arc<dyn VirtioInterrupt>,
    pub features: u64,
    pub sizes: Sizes,
    pub queues: Vec<ActiveQueue>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("queues", &self.queues)
            .finish_non_exhaustive()
    }
}

/// A virtqueue.
#[derive(Debug)]
pub(crate) struct Virtqueue {
    pub active: ActiveQueue,
    /// It may hold requests.
    pub ready: bool,
    used: UsedBatch,
    /// The driver wants an interrupt for entries that were published.
    unsignalled: bool,
}

impl Virtqueue {
    fn publish(&mut self, mem: &GuestMemMmap) -> Result<(), virtio_queue::Error> {
        self.unsignalled |= self.used.publish(mem, &mut self.active.queue)?;
        Ok(())
    }
}

/// All virtqueues of the driver.
#[derive(Default)]
pub(crate) struct Virtqueues {
    link: Option<(GuestMem, Arc<dyn VirtioInterrupt>)>,
    pub sizes: Option<Sizes>,
    pub queues: Vec<Virtqueue>,
    /// Position of the queue that is served first: the one that got too few slots, or none, when they last ran out.
    pub first: usize,
    broken: bool,
}

impl std::fmt::Debug for Virtqueues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Virtqueues")
            .field("queues", &self.queues)
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

impl Virtqueues {
    /// The virtqueues of a driver.
    pub fn new(driver: Driver) -> Self {
        let vq = |active| Virtqueue {
            active,
            ready: true,
            used: UsedBatch::default(),
            unsignalled: false,
        };
        Self {
            link: Some((driver.mem, driver.interrupt)),
            sizes: Some(driver.sizes),
            queues: driver.queues.into_iter().map(vq).collect(),
            first: 0,
            broken: false,
        }
    }

    /// Current guest memory, if there is a driver whose queues can be served.
    pub fn memory(&self) -> Option<Arc<GuestMemMmap>> {
        let (mem, _) = self.link.as_ref().filter(|_| !self.broken)?;
        Some(mem.memory().into_inner())
    }

    /// The queue with this index.
    pub fn queue(&mut self, index: u16) -> Option<&mut Virtqueue> {
        self.queues.iter_mut().find(|vq| vq.active.index == index)
    }

    /// True if there is a driver whose queues can be served.
    pub fn are_served(&self) -> bool {
        self.link.is_some() && !self.broken
    }

    /// Returns a chain to the driver, if it still exists. The driver sees it after [`Virtqueues::publish`].
    pub fn used(&mut self, queue: u16, mem: &GuestMemMmap, head: u16, len: u32) {
        let broken = self.broken;
        let Some(vq) = self.queue(queue).filter(|_| !broken) else {
            return;
        };
        if let Err(error) = vq.used.stage(mem, &vq.active.queue, head, len) {
            self.fail(&error);
        }
    }

    /// Shows the driver the chains that were returned so far.
    pub fn publish(&mut self) {
        if let Err(error) = self.publish_all() {
            self.fail(&error);
        }
    }

    /// Publishes the staged entries of all queues. Returns the first error after that.
    fn publish_all(&mut self) -> Result<(), virtio_queue::Error> {
        let Some((mem, _)) = self.link.as_ref().filter(|_| !self.broken) else {
            return Ok(());
        };
        let (mut memory, mut published) = (None, Ok(()));
        // The control queue last: once the driver sees that a task management function has ended, it expects the
        // answers of the tasks that it aborted in their queues.
        for vq in self.queues.iter_mut().rev().filter(|vq| !vq.used.is_empty()) {
            let result = vq.publish(memory.get_or_insert_with(|| mem.memory()));
            published = published.and(result);
        }
        published
    }

    /// Publishes, and sends one interrupt for every queue whose driver wants one.
    pub fn signal(&mut self) {
        self.publish();
        let Some((_, interrupt)) = &self.link else {
            return;
        };
        for vq in &mut self.queues {
            if std::mem::take(&mut vq.unsignalled) {
                interrupt.signal_queue(vq.active.index);
            }
        }
    }

    /// Marks the device as broken: it needs a reset.
    pub fn fail(&mut self, reason: &dyn std::fmt::Display) {
        // The requests that were answered before are done. Another error is no news.
        let _ = self.publish_all();
        if let Some((_, interrupt)) = &self.link
            && !std::mem::replace(&mut self.broken, true)
        {
            interrupt.needs_reset(&reason.to_string());
        }
    }

    /// Takes the queues back.
    pub fn take(&mut self) -> Vec<ActiveQueue> {
        self.queues.drain(..).map(|vq| vq.active).collect()
    }
}
