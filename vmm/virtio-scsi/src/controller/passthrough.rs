//! Commands in flight at passthrough devices, and queries of images' extents.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use vmm_sys_util::eventfd::EventFd;

use super::Controller;
use super::tasks::{RequestOutcome, StepOutcome};
use crate::extent_query::{ExtentQuery, MAX_QUERIES};
use crate::passthrough_workers::{CompletionSender, FinishedJob, Job, JobResult, PassthroughWorkers};
use crate::request::ResponseCode;
use crate::target::{PassthroughCommand, PassthroughDevice, Transfer};

/// The channel from the workers of all passthrough devices, and from the threads of queries.
pub(super) struct PassthroughState {
    completions: CompletionSender,
    finished: Receiver<FinishedJob>,
    /// Commands given to workers, and queries, whose result was not taken and that were not cancelled.
    pub under_way: usize,
    /// Queries that a thread executes; also counted in `under_way`.
    queries: usize,
    /// Queries that wait until a running one ends, with their tags.
    waiting_queries: VecDeque<(u16, ExtentQuery)>,
}

impl PassthroughState {
    pub fn new(wakeup: EventFd) -> Self {
        let (completions, finished) = CompletionSender::new(wakeup);
        Self {
            completions,
            finished,
            under_way: 0,
            queries: 0,
            waiting_queries: VecDeque::new(),
        }
    }

    pub fn workers(&self, device: Arc<dyn PassthroughDevice>) -> io::Result<PassthroughWorkers> {
        PassthroughWorkers::new(device, self.completions.clone())
    }
}

impl Controller {
    /// Gives a task's command to the workers of its unit.
    pub(super) fn submit_passthrough(&mut self, tag: u16, command_out: PassthroughCommand) -> StepOutcome {
        let slot = self.slots.get(tag);
        let workers = self
            .table
            .unit_mut(slot.unit_index)
            .and_then(|unit| unit.workers.as_mut());
        let (Some(mem), Some(workers)) = (&slot.mem, workers) else {
            return StepOutcome::BadBuffer;
        };
        let segments = match command_out.transfer {
            Transfer::Out(len) => slot.chain.data_out().part(0, len.into()).collect(),
            Transfer::In(len) => slot.chain.data_in().part(0, len.into()).collect(),
            Transfer::None | Transfer::Internal(_) => Vec::new(),
        };
        slot.fills |= matches!(command_out.transfer, Transfer::In(_));
        slot.with_worker = true;
        self.passthrough.under_way += 1;
        let mem = Arc::clone(mem);
        workers.submit(Job {
            tag,
            command_out,
            mem,
            segments,
        });
        StepOutcome::Submitted
    }

    /// Asks for an extent of a task's disk, at once or when fewer queries run.
    pub(super) fn query_extent(&mut self, tag: u16, query: ExtentQuery) -> io::Result<()> {
        let state = &mut self.passthrough;
        if state.queries == MAX_QUERIES {
            state.waiting_queries.push_back((tag, query));
        } else {
            query.start(tag, state.completions.clone())?;
            state.queries += 1;
        }
        state.under_way += 1;
        Ok(())
    }

    /// Cancels a task's query if it waits. Returns true if it did.
    pub(super) fn cancel_query(&mut self, tag: u16) -> bool {
        let state = &mut self.passthrough;
        let at = state
            .waiting_queries
            .iter()
            .position(|(waiting, _)| *waiting == tag);
        let cancelled = at.and_then(|at| state.waiting_queries.remove(at)).is_some();
        state.under_way -= usize::from(cancelled);
        cancelled
    }

    /// Starts the next query in place of one that has ended.
    fn query_ended(&mut self) {
        let state = &mut self.passthrough;
        state.queries -= 1;
        let Some((tag, query)) = state.waiting_queries.pop_front() else {
            return;
        };
        state.queries += 1;
        if let Err(error) = query.start(tag, state.completions.clone()) {
            let end = JobResult::Extent(Err(error));
            state.completions.finish(FinishedJob { tag, end });
        }
    }

    /// Continues tasks whose commands have ended. Returns true if there were any.
    pub(super) fn take_passthrough_results(&mut self) -> bool {
        let mut any = false;
        while let Ok(finished) = self.passthrough.finished.try_recv() {
            self.passthrough_done(finished);
            any = true;
        }
        any
    }

    /// Waits for the end of one command.
    pub(super) fn wait_for_passthrough(&mut self) {
        // Does not fail: the controller holds a sender, too.
        if let Ok(finished) = self.passthrough.finished.recv() {
            self.passthrough_done(finished);
        }
    }

    fn passthrough_done(&mut self, FinishedJob { tag, end }: FinishedJob) {
        self.passthrough.under_way -= 1;
        if matches!(end, JobResult::Extent(_)) {
            self.query_ended();
        }
        let slot = self.slots.get(tag);
        slot.with_worker = false;
        match (slot.cancelled, &mut slot.task, end) {
            (Some(code), ..) => self.finish(tag, &RequestOutcome::ResponseCode(code)),
            (None, Some(task), JobResult::Completed(result)) => {
                task.complete_passthrough_step(result);
                self.run_task(tag);
            }
            (None, Some(task), JobResult::Extent(extent)) => {
                task.complete_extent_step(extent);
                self.run_task(tag);
            }
            (None, ..) => self.finish(tag, &RequestOutcome::ResponseCode(ResponseCode::Failure)),
        }
    }

    /// Cancels a task's command if no worker has started it. Returns true if it did.
    pub(super) fn cancel_queued(&mut self, tag: u16) -> bool {
        if self.cancel_query(tag) {
            return true;
        }
        let slot = self.slots.get(tag);
        let workers = self
            .table
            .unit(slot.unit_index)
            .and_then(|unit| unit.workers.as_ref());
        let cancelled_early = slot.with_worker && workers.is_some_and(|workers| workers.cancel_queued(tag));
        if cancelled_early {
            slot.with_worker = false;
            self.passthrough.under_way -= 1;
        }
        cancelled_early
    }
}
