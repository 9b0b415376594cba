//! Requests that the controller took from their queues while no slot was free, because a task management function may
//! apply to them. They are served before the queues.

use std::sync::Arc;

use husk_devices::GuestMemMmap;
use virtio_queue::{QueueOwnedT, QueueT};

use super::tasks::RequestOutcome;
use super::{Controller, FatalError};
use crate::address::LunField;
use crate::request::ResponseCode;
use crate::virtqueues::REQUEST;

impl Controller {
    /// Takes all requests from the queues that were not served to their end.
    pub(super) fn fill_backlog(&mut self, mem: &GuestMemMmap) -> Result<(), FatalError> {
        for vq in &mut self.virtqueues.queues {
            let (index, queue) = (vq.active.index, &mut vq.active.queue);
            if index < REQUEST || !vq.ready {
                continue;
            }
            let size = queue.size();
            let broken = |error: &dyn std::fmt::Display| format!("queue {index}: {error}");
            let mut count = self.backlog.iter().filter(|(other, _)| *other == index).count();
            while let Some(chain) = queue.iter(mem).map_err(|e| broken(&e))?.next() {
                let head = chain.head_index();
                if head >= size {
                    return Err(broken(&"a chain outside of the queue"));
                }
                // A driver has one chain for each entry at most, until it is used.
                if count == usize::from(size) {
                    return Err(broken(&"more requests than entries of the queue"));
                }
                self.backlog.push_back((index, head));
                count += 1;
            }
        }
        Ok(())
    }

    /// Starts requests of the backlog as slots are free. Returns their number.
    pub(super) fn serve_backlog(&mut self, mem: &Arc<GuestMemMmap>) -> Result<usize, FatalError> {
        let mut found = 0;
        while self.slots.has_room()
            && let Some(from) = self.backlog.pop_front()
        {
            self.start_again(from, mem)?;
            found += 1;
        }
        Ok(found)
    }

    /// Answers the requests of these units in the backlog: all, or those with identifier `id`. They have not begun.
    pub(super) fn cancel_backlog(
        &mut self,
        unit_indices: &[u32],
        id: Option<u64>,
        code: ResponseCode,
        mem: &GuestMemMmap,
    ) -> Result<(), FatalError> {
        // After an error the driver has to reset the device, which forgets the others.
        for from in std::mem::take(&mut self.backlog) {
            if self.is_for(from, unit_indices, id, mem)? {
                let answered = self.respond(from, mem, &RequestOutcome::ResponseCode(code));
                answered.map_err(|e| format!("queue {}: {e}", from.0))?;
            } else {
                self.backlog.push_back(from);
            }
        }
        Ok(())
    }

    /// True if the backlog has a request of these units: any, or one with identifier `id`.
    pub(super) fn backlog_has(
        &mut self,
        unit_indices: &[u32],
        id: Option<u64>,
        mem: &GuestMemMmap,
    ) -> Result<bool, FatalError> {
        for at in 0..self.backlog.len() {
            if self.is_for(self.backlog[at], unit_indices, id, mem)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Parses a request, and returns true if it is for one of these units, with this identifier if there is one.
    fn is_for(
        &mut self,
        from: (u16, u16),
        unit_indices: &[u32],
        id: Option<u64>,
        mem: &GuestMemMmap,
    ) -> Result<bool, FatalError> {
        self.parse(from, mem)?;
        let Some(header) = self.parsed.header(mem) else {
            return Ok(false);
        };
        let unit = match LunField::parse(header.lun) {
            LunField::Unit(address) => self.table.find(address),
            LunField::Target(_) | LunField::Nowhere => None,
        };
        let wanted = id.is_none_or(|id| id == header.id);
        Ok(wanted && unit.is_some_and(|unit_index| unit_indices.contains(&unit_index)))
    }

    /// Starts a request that was taken from its queue before.
    pub(super) fn start_again(
        &mut self,
        from: (u16, u16),
        mem: &Arc<GuestMemMmap>,
    ) -> Result<(), FatalError> {
        self.parse(from, mem)?;
        let begun = self.command(from, mem);
        begun.map_err(|e| format!("queue {}: {e}", from.0))
    }

    /// Parses a request that was taken from its queue before.
    fn parse(&mut self, (index, head): (u16, u16), mem: &GuestMemMmap) -> Result<(), FatalError> {
        let broken = |error: &dyn std::fmt::Display| format!("queue {index}: {error}");
        let sizes = self.virtqueues.sizes.ok_or("no driver")?;
        let vq = self.virtqueues.queue(index);
        let queue = &vq.ok_or_else(|| broken(&"it is not enabled"))?.active.queue;
        let parsed = self.parsed.parse(mem, queue, head, sizes);
        parsed.map_err(|e| broken(&e))
    }
}
