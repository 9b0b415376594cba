//! The event queue: buffers the driver gives to be told something in (section 5.6.6.3).

use husk_devices::GuestMemMmap;
use husk_devices::virtio::chain;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestAddress;

use super::{Broken, Controller};
use crate::Address;
use crate::config::EVENT_SIZE;
use crate::events::{Event, What};
use crate::memory;
use crate::port::EVENT;

impl Controller {
    /// Tells the driver what it has room to be told.
    pub(super) fn deliver(&mut self) {
        let ready = self
            .port
            .line(EVENT)
            .is_some_and(|line| std::mem::take(&mut line.ready));
        if !ready && !self.events.is_pending() {
            return;
        }
        if let Some(mem) = self.port.memory()
            && let Err(reason) = self.deliver_to(&mem)
        {
            self.port.fail(&format!("event queue: {reason}"));
        }
    }

    fn deliver_to(&mut self, mem: &GuestMemMmap) -> Result<(), Broken> {
        let broken = |error: &dyn std::fmt::Display| error.to_string();
        while self.events.is_pending() {
            let Some(line) = self.port.line(EVENT) else {
                return Ok(());
            };
            let queue = &mut line.active.queue;
            let Some(chain) = queue.iter(mem).map_err(|e| broken(&e))?.next() else {
                if queue.enable_notification(mem).map_err(|e| broken(&e))? {
                    continue;
                }
                return Ok(());
            };
            let head = chain.head_index();
            chain::segments(chain, &mut self.readable, &mut self.writable).map_err(|e| broken(&e))?;
            if memory::len(&self.writable) < EVENT_SIZE as u64 {
                return Err("a buffer without room for an event".into());
            }
            let Some(event) = self.events.next() else { break };
            let written = memory::write(mem, &self.writable, &event.to_bytes()).map_err(|e| broken(&e))?;
            let buffer = self.writable.first().map(|segment| segment.address);
            let buffer = buffer.unwrap_or_default();
            self.given_back(&[buffer]);
            self.told(event, buffer);
            self.port.used(EVENT, mem, head, written as u32);
        }
        // There is nothing to do about new buffers before there is something to tell.
        match self.port.line(EVENT) {
            Some(line) => line
                .active
                .queue
                .disable_notification(mem)
                .map_err(|e| broken(&e)),
            None => Ok(()),
        }
    }

    /// The driver will read an event in a buffer.
    fn told(&mut self, event: Event, buffer: GuestAddress) {
        let of = match event {
            Event::Unit(address, What::Removed) => Some(address),
            // It finds out about all of them.
            Event::Missed => None,
            Event::Unit(..) => return,
        };
        let about = |address: Address| of.is_none_or(|of| of == address);
        for place in &self.removing {
            if let Some(unit) = self.table.unit_mut(*place)
                && about(unit.address)
                && let Some(removal) = &mut unit.removal
            {
                removal.tell(buffer);
            }
        }
        for (address, told) in &mut self.unreleased {
            if about(*address) {
                told.get_or_insert(buffer);
            }
        }
    }

    /// Takes note that the driver has given buffers back, which it does when it has done what the event in it asks for.
    fn given_back(&mut self, buffers: &[GuestAddress]) {
        let back = |told: Option<GuestAddress>| told.is_some_and(|told| buffers.contains(&told));
        self.unreleased.retain(|_, told| !back(*told));
        for place in &self.removing {
            if let Some(unit) = self.table.unit_mut(*place)
                && let Some(removal) = &mut unit.removal
            {
                removal.released |= back(removal.told);
            }
        }
    }

    /// Looks for buffers that were given back.
    pub(super) fn look_for_buffers(&mut self) {
        if !self.removing.is_empty() || !self.unreleased.is_empty() {
            let buffers = self.buffers_available();
            self.given_back(&buffers);
        }
    }

    /// The buffers in the event queue. Takes none out.
    fn buffers_available(&mut self) -> Vec<GuestAddress> {
        let Some(mem) = self.port.memory() else {
            return Vec::new();
        };
        let Some(line) = self.port.line(EVENT) else {
            return Vec::new();
        };
        let queue = Queue::try_from(line.active.queue.state());
        let chains = match &mut queue.map(|mut queue| queue.iter(&*mem).map(Iterator::collect::<Vec<_>>)) {
            Ok(Ok(chains)) => std::mem::take(chains),
            _ => return Vec::new(),
        };
        let firsts = chains.into_iter().filter_map(|mut chain| chain.next());
        firsts.map(|descriptor| descriptor.addr()).collect()
    }
}
