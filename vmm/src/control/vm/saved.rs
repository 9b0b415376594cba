//! Saves the VM, and goes on with a saved one.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use husk_proto::vmm::v1::{PauseReason, State};
use tonic::Status;

use super::{Vm, VmExit, failed, wrong_state};
use crate::control::saved::{CapturedVm, SavedVm};

impl Vm {
    /// Fails while a save is under way: it reads guest memory.
    pub(super) fn check_not_saving(&self) -> Result<(), Status> {
        match self.saving.strong_count() {
            0 => Ok(()),
            _ => Err(Status::failed_precondition("the VM is being saved")),
        }
    }

    /// Takes the state of the paused VM. Its memory was copied before if `precopied`.
    pub(super) fn save(&mut self, precopied: bool) -> Result<CapturedVm, Status> {
        self.check_not_saving()?;
        // The saved state would not have it.
        if self.deferred_reset.is_some() {
            return Err(Status::failed_precondition("the machine is to be reset"));
        }
        if self.state != State::Paused {
            return Err(wrong_state(self.state));
        }
        let written = match precopied {
            true => Some(self.written_since_precopy()?),
            false => None,
        };
        let booted_from = self.booted_from.clone();
        let soft_reboot_left = self.soft_reboot.left(Instant::now());
        let machine = self.machine_mut()?;
        let saved = machine.save();
        let saved = saved.map_err(|e| Status::failed_precondition(error_chain(&e)))?;
        let memory = machine.memory().clone();
        let saved = SavedVm::new(booted_from, soft_reboot_left, saved);
        let document = serde_json::to_vec(&saved).map_err(failed)?;
        let saving = Arc::new(());
        self.saving = Arc::downgrade(&saving);
        Ok(CapturedVm {
            document,
            memory,
            written,
            _saving: saving,
        })
    }

    /// Lets a saved VM go on, unless it is to be paused.
    pub(super) fn resume_restored(&mut self, booted_from: String, paused: bool) -> Result<(), VmExit> {
        crate::memory_trim::drop_text_pages();
        self.boots = 1;
        self.booted_from = booted_from;
        tracing::info!(paused, "going on from a saved state");
        if paused {
            self.pause_reasons.insert(PauseReason::User);
            self.set_state(State::Paused);
            return Ok(());
        }
        let running = self.running.as_mut().ok_or_else(|| VmExit::error("no machine"))?;
        running.machine.run().map_err(VmExit::error)?;
        self.set_state(State::Running);
        Ok(())
    }
}

/// An error and its causes, on one line.
pub(super) fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
