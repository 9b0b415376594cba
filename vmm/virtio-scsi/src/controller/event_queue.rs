//! The event queue: buffers of the driver for events (virtio 1.2, section 5.6.6.3).

use husk_devices::GuestMemMmap;
use husk_devices::virtio::chain;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestAddress;

use super::{Controller, FatalError};
use crate::UnitAddress;
use crate::config::EVENT_SIZE;
use crate::memory;
use crate::pending_events::{DriverEvent, UnitEvent};
use crate::virtqueues::EVENT;

impl Controller {
    /// Delivers pending events as far as the driver has buffers.
    pub(super) fn deliver(&mut self) {
        let ready = self
            .virtqueues
            .queue(EVENT)
            .is_some_and(|vq| std::mem::take(&mut vq.ready));
        if !ready && !self.events.is_pending() {
            return;
        }
        if let Some(mem) = self.virtqueues.memory()
            && let Err(reason) = self.deliver_to(&mem)
        {
            self.virtqueues.fail(&format!("event queue: {reason}"));
        }
    }

    fn deliver_to(&mut self, mem: &GuestMemMmap) -> Result<(), FatalError> {
        let broken = |error: &dyn std::fmt::Display| error.to_string();
        while self.events.is_pending() {
            let Some(vq) = self.virtqueues.queue(EVENT) else {
                return Ok(());
            };
            let queue = &mut vq.active.queue;
            let Some(chain) = queue.iter(mem).map_err(|e| broken(&e))?.next() else {
                if queue.enable_notification(mem).map_err(|e| broken(&e))? {
                    continue;
                }
                return Ok(());
            };
            let head = chain.head_index();
            chain::segments(queue, head, mem, &mut self.readable, &mut self.writable)
                .map_err(|e| broken(&e))?;
            if memory::len(&self.writable) < EVENT_SIZE as u64 {
                return Err("a buffer without room for an event".into());
            }
            let Some(event) = self.events.next() else { break };
            let written = memory::write(mem, &self.writable, 0, &event.to_bytes()).map_err(|e| broken(&e))?;
            let buffer = self.writable.first().map(|segment| segment.address);
            let buffer = buffer.unwrap_or_default();
            self.buffers_returned(&[buffer]);
            self.event_delivered(event, buffer);
            self.virtqueues.used(EVENT, mem, head, written as u32);
        }
        // New buffers matter only when an event is pending.
        match self.virtqueues.queue(EVENT) {
            Some(vq) => vq.active.queue.disable_notification(mem).map_err(|e| broken(&e)),
            None => Ok(()),
        }
    }

    /// Records the buffer of a delivered event in the removals that wait for the driver.
    fn event_delivered(&mut self, event: DriverEvent, buffer: GuestAddress) {
        let of = match event {
            DriverEvent::Unit(address, UnitEvent::Removed) => Some(address),
            // The driver scans, and so finds all removals.
            DriverEvent::Missed => None,
            DriverEvent::Unit(..) => return,
        };
        let about = |address: UnitAddress| of.is_none_or(|of| of == address);
        for unit_index in &self.removing {
            if let Some(unit) = self.table.unit_mut(*unit_index)
                && about(unit.address)
                && let Some(removal) = &mut unit.removal
            {
                removal.event_delivered(buffer);
            }
        }
        for (address, event_buffer) in &mut self.unacknowledged {
            if about(*address) {
                event_buffer.get_or_insert(buffer);
            }
        }
    }

    /// Records that the driver returned buffers. It does so after it has handled the event in them.
    fn buffers_returned(&mut self, buffers: &[GuestAddress]) {
        let back = |event_buffer: Option<GuestAddress>| {
            event_buffer.is_some_and(|event_buffer| buffers.contains(&event_buffer))
        };
        self.unacknowledged.retain(|_, event_buffer| !back(*event_buffer));
        for unit_index in &self.removing {
            if let Some(unit) = self.table.unit_mut(*unit_index)
                && let Some(removal) = &mut unit.removal
            {
                removal.buffer_returned |= back(removal.event_buffer);
            }
        }
    }

    /// Checks for buffers that the driver returned.
    pub(super) fn poll_event_buffers(&mut self) {
        if !self.removing.is_empty() || !self.unacknowledged.is_empty() {
            let buffers = self.buffers_available();
            self.buffers_returned(&buffers);
        }
    }

    /// Addresses of the buffers in the event queue. Takes none out.
    fn buffers_available(&mut self) -> Vec<GuestAddress> {
        let Some(mem) = self.virtqueues.memory() else {
            return Vec::new();
        };
        let Some(vq) = self.virtqueues.queue(EVENT) else {
            return Vec::new();
        };
        let queue = Queue::try_from(vq.active.queue.state());
        let chains = match &mut queue.map(|mut queue| queue.iter(&*mem).map(Iterator::collect::<Vec<_>>)) {
            Ok(Ok(chains)) => std::mem::take(chains),
            _ => return Vec::new(),
        };
        let firsts = chains.into_iter().filter_map(|mut chain| chain.next());
        firsts.map(|descriptor| descriptor.addr()).collect()
    }
}
