//! Commands that are with devices of the host.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use vmm_sys_util::eventfd::EventFd;

use super::Controller;
use super::tasks::{Outcome, Way};
use crate::request::Code;
use crate::target::{HostDevice, Passage, Transfer};
use crate::workers::{End, Finished, Job, Outlet, Workers};

/// See the module.
pub(super) struct Passages {
    outlet: Outlet,
    finished: Receiver<Finished>,
    /// Given to workers, and not taken from them or recalled.
    pub under_way: usize,
}

impl Passages {
    pub fn new(bell: EventFd) -> Self {
        let (outlet, finished) = Outlet::new(bell);
        Self {
            outlet,
            finished,
            under_way: 0,
        }
    }

    pub fn workers(&self, device: Arc<dyn HostDevice>) -> io::Result<Workers> {
        Workers::new(device, self.outlet.clone())
    }
}

impl Controller {
    /// Gives a task's command to the workers of its unit.
    pub(super) fn pass_on(&mut self, tag: u16, passage: Passage) -> Way {
        let slot = self.slots.get(tag);
        let workers = self
            .table
            .unit_mut(slot.place)
            .and_then(|unit| unit.workers.as_mut());
        let (Some(mem), Some(workers)) = (&slot.mem, workers) else {
            return Way::Lost;
        };
        let segments = match passage.transfer {
            Transfer::Out(_) => slot.chain.data_out.clone(),
            Transfer::In(_) => slot.chain.data_in.clone(),
            Transfer::None | Transfer::Kept(_) => Vec::new(),
        };
        slot.fills |= matches!(passage.transfer, Transfer::In(_));
        slot.passing = true;
        self.passages.under_way += 1;
        let mem = Arc::clone(mem);
        workers.submit(Job {
            tag,
            passage,
            mem,
            segments,
        });
        Way::Submitted
    }

    /// Goes on with tasks whose commands have ended. Returns whether there were any.
    pub(super) fn take_passages(&mut self) -> bool {
        let mut any = false;
        while let Ok(finished) = self.passages.finished.try_recv() {
            self.passed(finished);
            any = true;
        }
        any
    }

    /// Waits for the end of one of the commands that are under way.
    pub(super) fn wait_for_passage(&mut self) {
        // We have a sending end ourselves, so that there is always another.
        if let Ok(finished) = self.passages.finished.recv() {
            self.passed(finished);
        }
    }

    fn passed(&mut self, Finished { tag, end }: Finished) {
        self.passages.under_way -= 1;
        let slot = self.slots.get(tag);
        slot.passing = false;
        match (slot.cancelled, &mut slot.task, end) {
            (Some(code), ..) => self.finish(tag, &Outcome::Code(code)),
            (None, Some(task), End::Passed(result)) => {
                task.settle_passage(result);
                self.drive(tag);
            }
            (None, ..) => self.finish(tag, &Outcome::Code(Code::Failure)),
        }
    }

    /// Takes a task's command back from the workers, if none has begun it.
    pub(super) fn recall(&mut self, tag: u16) -> bool {
        let slot = self.slots.get(tag);
        let workers = self.table.unit(slot.place).and_then(|unit| unit.workers.as_ref());
        let recalled = slot.passing && workers.is_some_and(|workers| workers.recall(tag));
        if recalled {
            slot.passing = false;
            self.passages.under_way -= 1;
        }
        recalled
    }
}
