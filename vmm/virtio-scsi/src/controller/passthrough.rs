//! Commands in flight at passthrough devices.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use vmm_sys_util::eventfd::EventFd;

use super::Controller;
use super::tasks::{RequestOutcome, StepOutcome};
use crate::passthrough_workers::{CompletionSender, FinishedJob, Job, JobResult, PassthroughWorkers};
use crate::request::ResponseCode;
use crate::target::{PassthroughCommand, PassthroughDevice, Transfer};

/// The channel from the workers of all passthrough devices.
pub(super) struct PassthroughState {
    completions: CompletionSender,
    finished: Receiver<FinishedJob>,
    /// Commands given to workers whose result was not taken and that were not cancelled.
    pub under_way: usize,
}

impl PassthroughState {
    pub fn new(wakeup: EventFd) -> Self {
        let (completions, finished) = CompletionSender::new(wakeup);
        Self {
            completions,
            finished,
            under_way: 0,
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
        let slot = self.slots.get(tag);
        slot.with_worker = false;
        match (slot.cancelled, &mut slot.task, end) {
            (Some(code), ..) => self.finish(tag, &RequestOutcome::ResponseCode(code)),
            (None, Some(task), JobResult::Completed(result)) => {
                task.complete_passthrough_step(result);
                self.run_task(tag);
            }
            (None, ..) => self.finish(tag, &RequestOutcome::ResponseCode(ResponseCode::Failure)),
        }
    }

    /// Cancels a task's command if no worker has started it. Returns true if it did.
    pub(super) fn cancel_queued(&mut self, tag: u16) -> bool {
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
