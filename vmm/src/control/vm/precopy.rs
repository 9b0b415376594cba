//! Memory that is copied while the VM runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use husk_proto::vmm::v1::State;
use tonic::Status;

use super::{Vm, failed, wrong_state};
use crate::control::precopy::{CopyPass, CopyPermit};
use crate::ram::DirtyPages;

/// A copy of guest memory whose passes were not followed by a save yet.
#[derive(Debug)]
pub(super) struct Precopy {
    /// Ends the pass.
    stopped: Arc<AtomicBool>,
    /// Disconnected when the last pass has ended.
    pass: Receiver<()>,
    /// No pass follows.
    complete: bool,
}

impl Precopy {
    fn new() -> (Self, CopyPermit) {
        let (stopped, (alive, pass)) = (Arc::<AtomicBool>::default(), channel());
        let permit = CopyPermit {
            stopped: stopped.clone(),
            _alive: alive,
        };
        let complete = false;
        (
            Self {
                stopped,
                pass,
                complete,
            },
            permit,
        )
    }

    fn permit(&mut self) -> CopyPermit {
        let (alive, pass) = channel();
        self.pass = pass;
        CopyPermit {
            stopped: self.stopped.clone(),
            _alive: alive,
        }
    }

    /// Ends the pass, if there is one, and waits until nothing reads guest memory for it.
    fn stop(self) {
        self.stopped.store(true, Ordering::Relaxed);
        // Nothing is ever sent.
        let _ = self.pass.recv();
    }
}

impl Vm {
    /// Begins to log the pages that are written. Returns the first pass: all of memory.
    pub(super) fn start_precopy(&mut self) -> Result<CopyPass, Status> {
        self.check_not_saving()?;
        if self.precopy.is_some() {
            return Err(Status::failed_precondition(
                "the VM's memory is being copied already",
            ));
        }
        if !matches!(self.state, State::Running | State::Paused) {
            return Err(wrong_state(self.state));
        }
        let machine = self.machine_mut()?;
        machine.start_log().map_err(failed)?;
        let memory = machine.memory().clone();
        let (precopy, permit) = Precopy::new();
        self.precopy = Some(precopy);
        Ok(CopyPass {
            memory,
            written: None,
            permit,
        })
    }

    /// Returns the pages that were written since the last pass began.
    pub(super) fn next_pass(&mut self) -> Result<CopyPass, Status> {
        let (memory, written) = {
            let machine = self.machine()?;
            (machine.memory().clone(), machine.take_dirty().map_err(failed)?)
        };
        let precopy = self.precopy.as_mut().ok_or_else(ended)?;
        Ok(CopyPass {
            memory,
            written: Some(written),
            permit: precopy.permit(),
        })
    }

    /// The passes have ended.
    pub(super) fn passes_ended(&mut self, complete: bool) -> Result<(), Status> {
        match &mut self.precopy {
            Some(precopy) if complete => precopy.complete = true,
            _ => self.end_precopy()?,
        }
        Ok(())
    }

    /// The pages that were written since the last pass began. Ends the log.
    pub(super) fn written_since_precopy(&mut self) -> Result<DirtyPages, Status> {
        let precopy = self.precopy.as_ref().ok_or_else(ended)?;
        if !precopy.complete || precopy.pass.try_recv() == Err(TryRecvError::Empty) {
            return Err(Status::failed_precondition(
                "the VM's memory is still being copied",
            ));
        }
        let written = self.machine()?.take_dirty().map_err(failed);
        self.end_precopy()?;
        written
    }

    /// Ends the passes and the log, if there are any.
    pub(super) fn end_precopy(&mut self) -> Result<(), Status> {
        let Some(precopy) = self.precopy.take() else {
            return Ok(());
        };
        precopy.stop();
        self.machine_mut()?.stop_log().map_err(failed)
    }

    /// Ends the passes before a reset, which ends the log.
    pub(super) fn abort_precopy(&mut self) {
        if let Some(precopy) = self.precopy.take() {
            tracing::info!("a reset ends the copying of memory");
            precopy.stop();
        }
    }
}

fn ended() -> Status {
    Status::failed_precondition("the VM's memory was not copied, or it was reset since")
}
