//! The driver's end: memory, interrupts and queues, from activation to reset, without the queues while quiesced.

use std::sync::Arc;

use husk_devices::virtio::{ActiveQueue, VirtioInterrupt};
use husk_devices::{GuestMem, GuestMemMmap};
use virtio_queue::QueueT;
use vm_memory::GuestAddressSpace;

use crate::config::Sizes;

/// The control queue.
pub(crate) const CONTROL: u16 = 0;
/// The event queue.
pub(crate) const EVENT: u16 = 1;
/// The first of the request queues.
pub(crate) const REQUEST: u16 = 2;

/// What a driver brings.
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

/// A queue.
#[derive(Debug)]
pub(crate) struct Line {
    pub active: ActiveQueue,
    /// There may be something in it.
    pub ready: bool,
    /// The used ring grew since the driver was last told.
    unsignalled: bool,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Port {
    link: Option<(GuestMem, Arc<dyn VirtioInterrupt>)>,
    pub sizes: Option<Sizes>,
    pub lines: Vec<Line>,
    broken: bool,
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port")
            .field("lines", &self.lines)
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

impl Port {
    /// A port with a driver.
    pub fn new(driver: Driver) -> Self {
        let line = |active| Line {
            active,
            ready: true,
            unsignalled: false,
        };
        Self {
            link: Some((driver.mem, driver.interrupt)),
            sizes: Some(driver.sizes),
            lines: driver.queues.into_iter().map(line).collect(),
            broken: false,
        }
    }

    /// Guest memory as it is now, if there is a driver whose queues can be served.
    pub fn memory(&self) -> Option<Arc<GuestMemMmap>> {
        let (mem, _) = self.link.as_ref().filter(|_| !self.broken)?;
        Some(mem.memory().into_inner())
    }

    /// The queue of that index.
    pub fn line(&mut self, index: u16) -> Option<&mut Line> {
        self.lines.iter_mut().find(|line| line.active.index == index)
    }

    /// Whether a queue may have something in it, and can be served.
    pub fn is_ready(&self) -> bool {
        !self.broken && self.lines.iter().any(|line| line.ready)
    }

    /// Gives a chain back to the driver, if it is still there.
    pub fn used(&mut self, queue: u16, mem: &GuestMemMmap, head: u16, len: u32) {
        let broken = self.broken;
        let Some(line) = self.line(queue).filter(|_| !broken) else {
            return;
        };
        line.unsignalled = true;
        if let Err(error) = line.active.queue.add_used(mem, head, len) {
            self.fail(&error);
        }
    }

    /// One interrupt for every queue whose used ring grew.
    pub fn signal(&mut self) {
        let Some((mem, interrupt)) = &self.link else {
            return;
        };
        let mut memory = None;
        for line in &mut self.lines {
            if std::mem::take(&mut line.unsignalled) {
                let memory = memory.get_or_insert_with(|| mem.memory());
                if line.active.needs_notification(memory) {
                    interrupt.signal_queue(line.active.index);
                }
            }
        }
    }

    /// The driver broke something, or we did: the device needs a reset.
    pub fn fail(&mut self, reason: &dyn std::fmt::Display) {
        if let Some((_, interrupt)) = &self.link
            && !std::mem::replace(&mut self.broken, true)
        {
            interrupt.needs_reset(&reason.to_string());
        }
    }

    /// Takes the queues back.
    pub fn take(&mut self) -> Vec<ActiveQueue> {
        self.lines.drain(..).map(|line| line.active).collect()
    }
}
