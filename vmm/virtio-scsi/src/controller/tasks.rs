//! Requests, from the queue to the answer.

use std::sync::Arc;

use husk_devices::GuestMemMmap;
use husk_disk::{IoBuffer, IoCompletion, IoRequest};

use super::Controller;
use crate::address::Addressed;
use crate::config::Sizes;
use crate::memory::{self, Outside};
use crate::request::{Chain, Code, HEAD_OF_QUEUE, Header, ORDERED, Reply};
use crate::slots::{Kind, Slot};
use crate::target::{self, Command, Extent, Place, Response, Status, Step, absent};

/// SYNCHRONIZE CACHE (10) and (16).
const SYNCHRONIZE_CACHE: [u8; 2] = [0x35, 0x91];

/// How a request ends.
pub(super) enum Outcome {
    /// As its task did.
    Response(Response),
    /// Without its task.
    Code(Code),
}

/// What to do with a task's step.
pub(super) enum Way {
    /// The disk has it.
    Submitted,
    /// It ended already.
    Settled,
    /// A buffer of the driver's is not in memory.
    Lost,
}

impl Controller {
    /// Takes on the request that was parsed last, of the chain `from` (queue and head).
    pub(super) fn command(
        &mut self,
        from: (u16, u16),
        mem: &Arc<GuestMemMmap>,
        sizes: Sizes,
    ) -> Result<(), Outside> {
        let header = self.parsed.header(mem, sizes);
        let data_out = memory::len(&self.parsed.data_out);
        let data_in = memory::len(&self.parsed.data_in);
        let both = data_out > 0 && data_in > 0;
        let Some(header) = header.filter(|_| !both) else {
            return self.respond(from, mem, &Outcome::Code(Code::Failure));
        };
        let (target, place) = match Addressed::parse(header.lun) {
            Addressed::Unit(address) => (Some(address.target), self.table.find(address)),
            Addressed::Target(target) => (Some(target), None),
            Addressed::Nowhere => (None, None),
        };
        if let Some(place) = place {
            self.begin(place, from, mem, &header);
            return Ok(());
        }
        let outcome = match target.and_then(|target| self.table.luns(target)) {
            Some(luns) => Outcome::Response(absent(Command {
                cdb: header.cdb(),
                data_out,
                data_in,
                luns,
            })),
            None => Outcome::Code(Code::BadTarget),
        };
        self.respond(from, mem, &outcome)
    }

    /// Answers the request that was parsed last.
    fn respond(
        &mut self,
        (queue, head): (u16, u16),
        mem: &GuestMemMmap,
        outcome: &Outcome,
    ) -> Result<(), Outside> {
        let len = write(mem, &self.parsed, outcome, false)?;
        self.port.used(queue, mem, head, len);
        Ok(())
    }

    fn begin(&mut self, place: u32, (queue, head): (u16, u16), mem: &Arc<GuestMemMmap>, header: &Header) {
        let Some((unit, luns)) = self.table.unit_with_luns(place) else {
            return;
        };
        let Some((tag, slot)) = self.slots.take(Kind::Task, place) else {
            return;
        };
        std::mem::swap(&mut slot.chain, &mut self.parsed);
        let task = unit.logical.begin(Command {
            cdb: header.cdb(),
            data_out: memory::len(&slot.chain.data_out),
            data_in: memory::len(&slot.chain.data_in),
            luns,
        });
        let reports = task.reports_luns();
        slot.alone = task.exclusive().is_some() || header.attribute == ORDERED;
        slot.task = Some(task);
        slot.mem = Some(Arc::clone(mem));
        (slot.queue, slot.head, slot.id) = (queue, head, header.id);
        slot.opcode = header.cdb().first().copied().unwrap_or(0);
        if let Some(removal) = &mut unit.removal {
            removal.stir(false);
        }
        let runs = unit
            .order
            .enter(tag, slot.alone, header.attribute == HEAD_OF_QUEUE);
        slot.waiting = !runs;
        if reports {
            self.luns_reported(place);
        }
        if runs {
            self.drive(tag);
        }
    }

    /// The other units of a target need not tell any more that its LUNs changed.
    fn luns_reported(&mut self, place: u32) {
        let target = self.table.unit(place).map(|unit| unit.address.target);
        for (_, unit) in self.table.iter_mut() {
            if Some(unit.address.target) == target {
                unit.logical.luns_reported();
            }
        }
    }

    /// Lets tasks run whose turn it is. Returns whether there were any.
    pub(super) fn take_turns(&mut self) -> bool {
        let mut any = false;
        while let Some(place) = self.turns.pop() {
            while let Some(unit) = self.table.unit_mut(place) {
                let Some(tag) = unit.order.next(|tag| self.slots.is_alone(tag)) else {
                    break;
                };
                self.slots.get(tag).waiting = false;
                self.drive(tag);
                any = true;
            }
        }
        any
    }

    /// Takes a task as far as it gets without waiting.
    pub(super) fn drive(&mut self, tag: u16) {
        loop {
            let slot = self.slots.get(tag);
            let Some(unit) = self.table.unit_mut(slot.place) else {
                return;
            };
            let Some(task) = &mut slot.task else { return };
            let step = match task.next(&mut unit.logical) {
                Step::Done(response) => return self.finish(tag, &Outcome::Response(response)),
                step => step,
            };
            match self.take_step(tag, &step) {
                Way::Submitted => return,
                Way::Settled => {}
                Way::Lost => return self.finish(tag, &Outcome::Code(Code::Failure)),
            }
        }
    }

    fn take_step(&mut self, tag: u16, step: &Step) -> Way {
        let slot = self.slots.get(tag);
        let place = slot.place;
        let Slot {
            task: Some(task),
            mem: Some(mem),
            chain,
            ..
        } = slot
        else {
            return Way::Lost;
        };
        if let Step::Pass(passage) = step {
            return self.pass_on(tag, *passage);
        }
        if let Step::Pull { offset, into } = step {
            let Some(scratch) = task.scratch_mut().get_mut(into.clone()) else {
                return Way::Lost;
            };
            if memory::read(mem, &chain.data_out, *offset, scratch).is_err() {
                return Way::Lost;
            }
            task.settle(Ok(()));
            return Way::Settled;
        }
        let disk = self.table.unit(place).and_then(|unit| unit.disk);
        let found = disk.and_then(|id| Some((id, self.engine.disk(id)?)));
        let Some((id, disk)) = found else {
            task.settle(Err(std::io::ErrorKind::NotFound.into()));
            return Way::Settled;
        };
        let buffers = &mut self.buffers;
        let request = match *step {
            Step::Extent { offset, .. } => {
                let extent = disk.extent(offset).map(|extent| Extent {
                    allocated: extent.allocated,
                    len: extent.len,
                });
                task.settle_extent(extent);
                return Way::Settled;
            }
            Step::Read { offset, len, into } => {
                if !map(task, mem, &chain.data_in, into, len, buffers) {
                    return Way::Lost;
                }
                slot.fills |= matches!(into, Place::Initiator(_));
                IoRequest::Read { offset, buffers }
            }
            Step::Write {
                offset,
                len,
                from,
                durable,
            } => {
                if !map(task, mem, &chain.data_out, from, len, buffers) {
                    return Way::Lost;
                }
                IoRequest::Write {
                    offset,
                    buffers,
                    durable,
                }
            }
            Step::Flush => IoRequest::Flush,
            Step::Discard { offset, len, durable } => IoRequest::Discard { offset, len, durable },
            Step::WriteZeroes {
                offset,
                len,
                unmap,
                durable,
            } => IoRequest::WriteZeroes {
                offset,
                len,
                unmap,
                durable,
            },
            Step::Pull { .. } | Step::Pass(_) | Step::Done(_) => return Way::Lost,
        };
        // SAFETY: the tag is this slot's, and no step of its task is under way. The buffers are slices of the memory that
        // the slot keeps, or of its task's scratch buffer, which stays where it is: both until the completion. The
        // engine is dropped before the slots.
        unsafe { self.engine.submit(tag, id, request) };
        Way::Submitted
    }

    pub(super) fn completed(&mut self, IoCompletion { tag, result }: IoCompletion) {
        let slot = self.slots.get(tag);
        match slot.kind {
            Kind::Flush => {
                let place = slot.place;
                self.slots.free(tag);
                self.flushed(place, result);
            }
            Kind::Task => match (slot.cancelled, &mut slot.task) {
                (Some(code), _) => self.finish(tag, &Outcome::Code(code)),
                (None, Some(task)) => {
                    task.settle(result);
                    self.drive(tag);
                }
                (None, None) => {}
            },
            Kind::Free => {}
        }
    }

    /// Answers a request whose task is not under way, and lets others have what it had.
    pub(super) fn finish(&mut self, tag: u16, outcome: &Outcome) {
        let slot = self.slots.get(tag);
        if let Some(mem) = slot.mem.take()
            && self.port.line(slot.queue).is_some()
        {
            if slot.fills {
                // After an error too: some of it may have been filled.
                memory::mark_dirty(&mem, &slot.chain.data_in);
            }
            match write(&mem, &slot.chain, outcome, slot.fills) {
                Ok(len) => self.port.used(slot.queue, &mem, slot.head, len),
                Err(error) => self.port.fail(&error),
            }
        }
        let (place, waited, cancelled) = (slot.place, slot.waiting, slot.cancelled.is_some());
        if let Some(unit) = self.table.unit_mut(place) {
            if waited {
                unit.order.cancel(tag);
                self.turns.push(place);
            } else if unit.order.leave(slot.alone) {
                self.turns.push(place);
            }
            if let Some(removal) = &mut unit.removal {
                let good = matches!(outcome, Outcome::Response(response) if response.status == Status::Good);
                removal.stir(good && SYNCHRONIZE_CACHE.contains(&slot.opcode));
            }
        }
        self.slots.free(tag);
        if cancelled {
            self.task_ended(tag);
        }
    }

    /// Cancels tasks of units, all or those of one name. Those that wait are answered at once. Returns the others, which
    /// will be when their steps have ended.
    pub(super) fn cancel(&mut self, places: &[u32], id: Option<u64>, code: Code) -> Vec<u16> {
        let mut waiting = Vec::new();
        let mut running = Vec::new();
        for (tag, slot) in self.slots.tasks() {
            if !places.contains(&slot.place) || id.is_some_and(|id| id != slot.id) {
                continue;
            }
            if slot.waiting {
                waiting.push(tag);
            } else {
                slot.cancelled.get_or_insert(code);
                running.push(tag);
            }
        }
        running.retain(|tag| {
            let recalled = self.recall(*tag);
            if recalled {
                waiting.push(*tag);
            }
            !recalled
        });
        for tag in waiting {
            self.finish(tag, &Outcome::Code(code));
        }
        running
    }
}

/// Makes buffers of the place of a step's bytes.
fn map(
    task: &mut target::Task,
    mem: &GuestMemMmap,
    segments: &[husk_devices::virtio::chain::Segment],
    place: Place,
    len: u64,
    buffers: &mut Vec<IoBuffer>,
) -> bool {
    match place {
        Place::Initiator(offset) => memory::map(mem, segments, offset, len, buffers).is_ok(),
        Place::Scratch(offset) => {
            let scratch = task.scratch_mut().get_mut(offset..);
            let scratch = scratch.and_then(|scratch| scratch.get_mut(..usize::try_from(len).ok()?));
            buffers.clear();
            scratch
                .map(|bytes| buffers.push(IoBuffer::new(bytes.as_mut_ptr(), bytes.len())))
                .is_some()
        }
    }
}

fn write(mem: &GuestMemMmap, chain: &Chain, outcome: &Outcome, filled: bool) -> Result<u32, Outside> {
    let data_in = memory::len(&chain.data_in);
    let all = data_in + memory::len(&chain.data_out);
    match outcome {
        Outcome::Code(code) => chain.respond(mem, &Reply::code(*code, all), &[], 0),
        Outcome::Response(response) if response.overrun => {
            chain.respond(mem, &Reply::code(Code::Overrun, all), &[], 0)
        }
        Outcome::Response(Response {
            failure: Some(failure),
            ..
        }) => chain.respond(mem, &Reply::code(Code::of(*failure), all), &[], 0),
        Outcome::Response(response) => {
            let reply = Reply {
                code: Code::Ok,
                status: response.status as u8,
                residual: response.residual,
                sense: &response.sense,
            };
            let done = filled && response.status == Status::Good;
            let filled = if done {
                data_in.saturating_sub(response.residual)
            } else {
                0
            };
            chain.respond(mem, &reply, &response.data, filled)
        }
    }
}
