//! Memory that is copied while the VM runs.

use std::sync::Arc;

use husk_proto::vmm::v1::{PauseReason, State};
use tonic::Status;

use super::{Vm, failed, wrong_state};
use crate::control::precopy::CopyPass;
use crate::machine::MachineError;
use crate::ram::{CopyGate, DirtyPages};

/// A copy of guest memory that no save has followed yet. Its gate identifies it.
#[derive(Debug)]
pub(super) struct Precopy {
    gate: Arc<CopyGate>,
    /// No pass follows.
    complete: bool,
}

impl Vm {
    /// Begins to log the pages that are written. Returns the first pass: all of memory.
    pub(super) fn start_precopy(&mut self) -> Result<CopyPass, Status> {
        self.check_not_saving()?;
        self.check_not_copied()?;
        if !matches!(self.state, State::Running | State::Paused) {
            return Err(wrong_state(self.state));
        }
        let started = self.machine_mut()?.start_log();
        started.map_err(|error| self.log_failed(&error))?;
        let gate = Arc::<CopyGate>::default();
        self.precopy = Some(Precopy {
            gate: gate.clone(),
            complete: false,
        });
        Ok(CopyPass {
            memory: self.machine()?.memory().clone(),
            written: None,
            gate,
        })
    }

    /// Fails while memory is being copied, or its written pages are logged.
    pub(super) fn check_not_copied(&self) -> Result<(), Status> {
        match self.precopy {
            None => Ok(()),
            Some(_) => Err(Status::failed_precondition(
                "the VM's memory is being copied for a snapshot",
            )),
        }
    }

    /// The copy with this gate.
    fn precopy_of(&mut self, gate: &Arc<CopyGate>) -> Option<&mut Precopy> {
        self.precopy
            .as_mut()
            .filter(|precopy| Arc::ptr_eq(&precopy.gate, gate))
    }

    /// Returns the pages that were written since the last pass of the copy with this gate began.
    pub(super) fn next_pass(&mut self, gate: Arc<CopyGate>) -> Result<CopyPass, Status> {
        self.precopy_of(&gate).ok_or_else(ended)?;
        let machine = self.machine()?;
        Ok(CopyPass {
            memory: machine.memory().clone(),
            written: Some(machine.take_dirty().map_err(failed)?),
            gate,
        })
    }

    /// The passes of the copy with this gate have ended.
    pub(super) fn passes_ended(&mut self, gate: &Arc<CopyGate>, complete: bool) -> Result<(), Status> {
        match self.precopy_of(gate) {
            Some(precopy) if complete => precopy.complete = true,
            Some(_) => self.end_precopy()?,
            None if complete => return Err(ended()),
            None => {}
        }
        Ok(())
    }

    /// The pages that were written since the last pass began. Ends the log.
    pub(super) fn written_since_precopy(&mut self) -> Result<DirtyPages, Status> {
        let precopy = self.precopy.as_ref().ok_or_else(ended)?;
        if !precopy.complete {
            return Err(Status::failed_precondition(
                "the VM's memory is still being copied",
            ));
        }
        let written = self.machine()?.take_dirty().map_err(failed);
        self.end_precopy()?;
        written
    }

    /// Ends the passes and the log, if there are any. A log can be left of passes whose end failed.
    pub(super) fn end_precopy(&mut self) -> Result<(), Status> {
        self.stop_precopy();
        let Some(running) = &mut self.running else {
            return Ok(());
        };
        let stopped = running.machine.stop_log();
        stopped.map_err(|error| self.log_failed(&error))
    }

    /// Ends a log that no copy reads.
    pub(super) fn end_left_log(&mut self) -> Result<(), MachineError> {
        match (&self.precopy, &mut self.running) {
            (None, Some(running)) => running.machine.stop_log(),
            _ => Ok(()),
        }
    }

    /// Ends the passes, before a reset or the end, which end the log. Nothing reads guest memory for them afterwards.
    /// Returns false if there are none.
    pub(super) fn stop_precopy(&mut self) -> bool {
        let Some(precopy) = self.precopy.take() else {
            return false;
        };
        precopy.gate.close();
        true
    }

    /// An error of the log. If the machine did not run on, the VM is paused.
    fn log_failed(&mut self, error: &MachineError) -> Status {
        let paused = self.machine().is_ok_and(|machine| machine.is_paused());
        if paused && self.state == State::Running {
            self.pause_reasons.insert(PauseReason::Snapshot);
            self.set_state(State::Paused);
        }
        failed(error)
    }
}

fn ended() -> Status {
    Status::failed_precondition("the VM's memory was not copied, or it was reset since")
}

#[cfg(test)]
mod tests {
    use super::super::testing::with_machine;
    use super::*;

    #[tokio::test]
    #[ignore = "needs /dev/kvm"]
    async fn a_log_that_no_copy_reads_ends_at_a_pause_and_a_resume() {
        let mut vm = with_machine();
        // The copy has ended, but the machine could not be stopped to end the log.
        let left = |vm: &mut Vm| {
            let machine = &mut vm.running.as_mut().unwrap().machine;
            machine.pause().unwrap();
            machine.start_log().unwrap();
        };
        let is_logged = |vm: &Vm| vm.machine().unwrap().take_dirty().is_ok();
        left(&mut vm);
        assert!(is_logged(&vm));
        vm.pause(PauseReason::User).unwrap();
        assert!(!is_logged(&vm));
        left(&mut vm);
        vm.pause(PauseReason::Snapshot).unwrap();
        vm.start_precopy().unwrap();
        vm.pause(PauseReason::User).unwrap();
        assert!(is_logged(&vm), "a copy reads it");
        vm.stop_precopy();
        vm.resume(PauseReason::Snapshot).unwrap();
        assert!(!is_logged(&vm));
        assert_eq!(vm.state, State::Paused);
    }
}
