//! Requests, from the queue to the response.

use std::sync::Arc;

use husk_devices::GuestMemMmap;
use husk_devices::virtio::access::OutsideMemory;
use husk_disk::{IoBuffer, IoCompletion, IoRequest};

use super::Controller;
use crate::address::LunField;
use crate::extent_query::ExtentQuery;
use crate::memory::DataBuffer;
use crate::request::{CommandHeader, HEAD_OF_QUEUE, ORDERED, RequestChain, ResponseCode, ResponseFields};
use crate::target::{self, DataLocation, ScsiCommand, ScsiResponse, ScsiStatus, Step, absent};
use crate::task_slots::{SlotUse, TaskSlot};

/// SYNCHRONIZE CACHE (10) and (16).
const SYNCHRONIZE_CACHE: [u8; 2] = [0x35, 0x91];

/// The result of a request.
pub(super) enum RequestOutcome {
    /// The response of its task.
    Task(ScsiResponse),
    /// A response code without a task.
    ResponseCode(ResponseCode),
}

/// The result of starting a step.
pub(super) enum StepOutcome {
    /// The disk or a worker executes it.
    Submitted,
    /// It has ended already.
    Settled,
    /// A buffer of the driver is not in guest memory.
    BadBuffer,
}

impl Controller {
    /// Starts the request that was parsed last, of the chain `from` (queue and head).
    pub(super) fn command(&mut self, from: (u16, u16), mem: &Arc<GuestMemMmap>) -> Result<(), OutsideMemory> {
        let header = self.parsed.header(mem);
        let (data_out, data_in) = (self.parsed.data_out_len, self.parsed.data_in_len);
        let both = data_out > 0 && data_in > 0;
        let Some(header) = header.filter(|_| !both) else {
            return self.respond(from, mem, &RequestOutcome::ResponseCode(ResponseCode::Failure));
        };
        let (target, unit_index) = match LunField::parse(header.lun) {
            LunField::Unit(address) => (Some(address.target), self.table.find(address)),
            LunField::Target(target) => (Some(target), None),
            LunField::Nowhere => (None, None),
        };
        if let Some(unit_index) = unit_index {
            self.begin(unit_index, from, mem, &header);
            return Ok(());
        }
        let outcome = match target.and_then(|target| self.table.luns(target)) {
            Some(luns) => RequestOutcome::Task(absent(ScsiCommand {
                cdb: header.cdb(),
                data_out,
                data_in,
                luns,
            })),
            None => RequestOutcome::ResponseCode(ResponseCode::BadTarget),
        };
        self.respond(from, mem, &outcome)
    }

    /// Answers the request that was parsed last.
    pub(super) fn respond(
        &mut self,
        (queue, head): (u16, u16),
        mem: &GuestMemMmap,
        outcome: &RequestOutcome,
    ) -> Result<(), OutsideMemory> {
        let len = write(mem, &self.parsed, outcome, false)?;
        self.virtqueues.used(queue, mem, head, len);
        Ok(())
    }

    fn begin(
        &mut self,
        unit_index: u32,
        (queue, head): (u16, u16),
        mem: &Arc<GuestMemMmap>,
        header: &CommandHeader,
    ) {
        let Some((unit, luns)) = self.table.unit_with_luns(unit_index) else {
            return;
        };
        let Some((tag, slot)) = self.slots.take(SlotUse::Task, unit_index) else {
            return;
        };
        std::mem::swap(&mut slot.chain, &mut self.parsed);
        let task = unit.logical.begin(ScsiCommand {
            cdb: header.cdb(),
            data_out: slot.chain.data_out_len,
            data_in: slot.chain.data_in_len,
            luns,
        });
        let reports = task.reports_luns();
        slot.exclusive = task.exclusive().is_some() || task.runs_alone() || header.attribute == ORDERED;
        slot.task = Some(task);
        slot.mem = Some(Arc::clone(mem));
        (slot.queue, slot.head, slot.id) = (queue, head, header.id);
        slot.opcode = header.cdb().first().copied().unwrap_or(0);
        if let Some(removal) = &mut unit.removal {
            removal.note_command(false);
        }
        let runs = unit
            .task_set
            .enter(tag, slot.exclusive, header.attribute == HEAD_OF_QUEUE);
        slot.waiting = !runs;
        if reports {
            self.luns_reported(unit_index);
        }
        if runs {
            self.run_task(tag);
        }
    }

    /// Clears REPORTED LUNS DATA HAS CHANGED on the other units of a target.
    fn luns_reported(&mut self, unit_index: u32) {
        let target = self.table.unit(unit_index).map(|unit| unit.address.target);
        for (_, unit) in self.table.iter_mut() {
            if Some(unit.address.target) == target {
                unit.logical.luns_reported();
            }
        }
    }

    /// Runs waiting tasks that may run now. Returns true if there were any.
    pub(super) fn start_waiting_tasks(&mut self) -> bool {
        let mut any = false;
        while let Some(unit_index) = self.runnable_units.pop() {
            while let Some(unit) = self.table.unit_mut(unit_index) {
                let Some(tag) = unit.task_set.next(|tag| self.slots.is_exclusive(tag)) else {
                    break;
                };
                self.slots.get(tag).waiting = false;
                self.run_task(tag);
                any = true;
            }
        }
        any
    }

    /// Runs a task until it has to wait or ends.
    pub(super) fn run_task(&mut self, tag: u16) {
        loop {
            let slot = self.slots.get(tag);
            let Some(unit) = self.table.unit_mut(slot.unit_index) else {
                return;
            };
            let Some(task) = &mut slot.task else { return };
            let step = match task.next(&mut unit.logical) {
                Step::Done(response) => return self.finish(tag, &RequestOutcome::Task(response)),
                step => step,
            };
            match self.execute_step(tag, &step) {
                StepOutcome::Submitted => return,
                StepOutcome::Settled => {}
                StepOutcome::BadBuffer => {
                    return self.finish(tag, &RequestOutcome::ResponseCode(ResponseCode::Failure));
                }
            }
        }
    }

    fn execute_step(&mut self, tag: u16, step: &Step) -> StepOutcome {
        let slot = self.slots.get(tag);
        let unit_index = slot.unit_index;
        let TaskSlot {
            task: Some(task),
            mem: Some(mem),
            chain,
            ..
        } = slot
        else {
            return StepOutcome::BadBuffer;
        };
        if let Step::Passthrough(command_out) = step {
            return self.submit_passthrough(tag, *command_out);
        }
        if let Step::Pull { offset, into } = step {
            let Some(scratch) = task.scratch_mut().get_mut(into.clone()) else {
                return StepOutcome::BadBuffer;
            };
            if chain.data_out().read(mem, *offset, scratch).is_err() {
                return StepOutcome::BadBuffer;
            }
            task.complete_step(Ok(()));
            return StepOutcome::Settled;
        }
        let disk = self.table.unit(unit_index).and_then(|unit| unit.disk);
        let found = disk.and_then(|id| Some((id, self.engine.disk(id)?)));
        let Some((id, disk)) = found else {
            task.complete_step(Err(std::io::ErrorKind::NotFound.into()));
            return StepOutcome::Settled;
        };
        let buffers = &mut self.buffers;
        let request = match *step {
            Step::Extent { offset, .. } => {
                let disk = disk.clone();
                let Err(refused) = self.query_extent(tag, ExtentQuery { disk, offset }) else {
                    return StepOutcome::Submitted;
                };
                if let Some(task) = &mut self.slots.get(tag).task {
                    task.complete_step(Err(refused));
                }
                return StepOutcome::Settled;
            }
            Step::Read { offset, len, into } => {
                if !map(task, mem, chain.data_in(), into, len, buffers) {
                    return StepOutcome::BadBuffer;
                }
                if let DataLocation::Initiator(at) = into {
                    slot.fills = true;
                    slot.begin_dma(at, len);
                }
                IoRequest::Read { offset, buffers }
            }
            Step::Write {
                offset,
                len,
                from,
                durable,
            } => {
                if !map(task, mem, chain.data_out(), from, len, buffers) {
                    return StepOutcome::BadBuffer;
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
            Step::Pull { .. } | Step::Passthrough(_) | Step::Done(_) => return StepOutcome::BadBuffer,
        };
        // SAFETY: the tag is this slot's, and no step of its task is in flight. The buffers are slices of the memory
        // that the slot keeps, or of its task's scratch buffer, which stays in place: both until the completion. The
        // engine is dropped before the slots.
        unsafe { self.engine.submit(tag, id, request) };
        StepOutcome::Submitted
    }

    pub(super) fn completed(&mut self, IoCompletion { tag, result }: IoCompletion) {
        let slot = self.slots.get(tag);
        slot.end_dma();
        match slot.kind {
            SlotUse::Flush => {
                let unit_index = slot.unit_index;
                self.slots.free(tag);
                self.flushed(unit_index, result);
            }
            SlotUse::Task => match (slot.cancelled, &mut slot.task) {
                (Some(code), _) => self.finish(tag, &RequestOutcome::ResponseCode(code)),
                (None, Some(task)) => {
                    task.complete_step(result);
                    self.run_task(tag);
                }
                (None, None) => {}
            },
            SlotUse::Free => {}
        }
    }

    /// Answers a request whose task does not run, and releases its resources.
    pub(super) fn finish(&mut self, tag: u16, outcome: &RequestOutcome) {
        let slot = self.slots.get(tag);
        if let Some(mem) = slot.mem.take()
            && self.virtqueues.queue(slot.queue).is_some()
        {
            match write(&mem, &slot.chain, outcome, slot.fills) {
                Ok(len) => self.virtqueues.used(slot.queue, &mem, slot.head, len),
                Err(error) => self.virtqueues.fail(&error),
            }
        }
        let (unit_index, waited, cancelled) = (slot.unit_index, slot.waiting, slot.cancelled.is_some());
        if let Some(unit) = self.table.unit_mut(unit_index) {
            if waited {
                unit.task_set.cancel(tag);
                self.runnable_units.push(unit_index);
            } else if unit.task_set.leave(slot.exclusive) {
                self.runnable_units.push(unit_index);
            }
            if let Some(removal) = &mut unit.removal {
                let good =
                    matches!(outcome, RequestOutcome::Task(response) if response.status == ScsiStatus::Good);
                removal.note_command(good && SYNCHRONIZE_CACHE.contains(&slot.opcode));
            }
        }
        self.slots.free(tag);
        if cancelled {
            self.task_ended(tag);
        }
    }

    /// Cancels tasks of units: all, or those with identifier `id`. Answers waiting tasks at once. Returns the running
    /// ones, which are answered when their steps have ended.
    pub(super) fn cancel(&mut self, unit_indices: &[u32], id: Option<u64>, code: ResponseCode) -> Vec<u16> {
        let mut waiting = Vec::new();
        let mut running = Vec::new();
        for (tag, slot) in self.slots.tasks() {
            if !unit_indices.contains(&slot.unit_index) || id.is_some_and(|id| id != slot.id) {
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
            let cancelled_early = self.cancel_queued(*tag);
            if cancelled_early {
                waiting.push(*tag);
            }
            !cancelled_early
        });
        for tag in waiting {
            self.finish(tag, &RequestOutcome::ResponseCode(code));
        }
        self.engine.abandon_zeroing(&running);
        running
    }
}

/// Builds the buffers of a step.
fn map(
    task: &mut target::Task,
    mem: &GuestMemMmap,
    data: DataBuffer<'_>,
    location: DataLocation,
    len: u64,
    buffers: &mut Vec<IoBuffer>,
) -> bool {
    match location {
        DataLocation::Initiator(offset) => data.map(mem, offset, len, buffers).is_ok(),
        DataLocation::Scratch(offset) => {
            let scratch = task.scratch_mut().get_mut(offset..);
            let scratch = scratch.and_then(|scratch| scratch.get_mut(..usize::try_from(len).ok()?));
            buffers.clear();
            scratch
                .map(|bytes| buffers.push(IoBuffer::new(bytes.as_mut_ptr(), bytes.len())))
                .is_some()
        }
    }
}

fn write(
    mem: &GuestMemMmap,
    chain: &RequestChain,
    outcome: &RequestOutcome,
    filled: bool,
) -> Result<u32, OutsideMemory> {
    let data_in = chain.data_in_len;
    let all = data_in + chain.data_out_len;
    match outcome {
        RequestOutcome::ResponseCode(code) => chain.respond(mem, &ResponseFields::code(*code, all), &[], 0),
        RequestOutcome::Task(response) if response.overrun => {
            chain.respond(mem, &ResponseFields::code(ResponseCode::Overrun, all), &[], 0)
        }
        RequestOutcome::Task(ScsiResponse {
            failure: Some(failure),
            ..
        }) => chain.respond(
            mem,
            &ResponseFields::code(ResponseCode::of(*failure), all),
            &[],
            0,
        ),
        RequestOutcome::Task(response) => {
            let reply = ResponseFields {
                code: ResponseCode::Ok,
                status: response.status as u8,
                residual: response.residual,
                sense: &response.sense,
            };
            let done = filled && response.status == ScsiStatus::Good;
            let filled = if done {
                data_in.saturating_sub(response.residual)
            } else {
                0
            };
            chain.respond(mem, &reply, &response.data, filled)
        }
    }
}
