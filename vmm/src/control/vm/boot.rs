//! Loads a kernel and starts the machine, at power-on and at a reset.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use husk_proto::vmm::v1::event::Event as Kind;
use husk_proto::vmm::v1::{self as pb, ExitReason, PauseReason, State};
use husk_seccomp::{ThreadRole, install};
use tonic::Status;

use super::{Message, PauseReasons, SoftReboot, Vm, VmExit, failed};
use crate::boot::{BootError, LoadedKernel};
use crate::control::service::VmmCommand;
use crate::machine::MachineError;
use crate::vcpu::VcpuError;

/// Maximum time to find and load a kernel, on slow storage too.
const LOAD_TIMEOUT: Duration = Duration::from_secs(120);

impl Vm {
    /// Loads a kernel, or resumes a restored machine, which needs none. Runs the machine unless it is to be paused.
    ///
    /// # Errors
    /// The VM ends: there is no kernel, or the monitor wants it to end meanwhile.
    pub(super) fn boot(&mut self, paused: bool) -> Result<(), VmExit> {
        let running = self.running.as_mut().ok_or_else(|| VmExit::error("no machine"))?;
        if let Some(booted_from) = running.restored.take() {
            return self.resume_restored(booted_from, paused);
        }
        let loader = running.machine.loader().map_err(VmExit::error)?;
        let source = Arc::clone(&running.source);
        let done = self.messages.clone();
        // On a separate, filtered thread: reading takes time, and the guest controls the image.
        std::thread::Builder::new()
            .name("boot".into())
            .spawn(move || {
                install(ThreadRole::Boot);
                let result = catch_unwind(AssertUnwindSafe(|| loader.load(&source)));
                let _ = done.send(Message::Loaded(result.unwrap_or_else(|_| {
                    Err(BootError::NoBootableDisk(
                        "internal error while loading the kernel".into(),
                    ))
                })));
            })
            .map_err(VmExit::error)?;
        let failed = |text: String| VmExit::new(ExitReason::BootFailed, text);
        // A hostile filesystem may keep its reader busy for ever. The end of the process then ends the reader too.
        let LoadedKernel { entry, description } = match self.mailbox.loaded_or_end(LOAD_TIMEOUT) {
            Some(Message::Loaded(loaded)) => loaded.map_err(|e| failed(e.to_string()))?,
            Some(Message::Command(VmmCommand::Stop(reply))) => return Err(super::stopped(reply)),
            Some(_) => return Err(super::control_closed()),
            None => return Err(failed(format!("no kernel was loaded within {LOAD_TIMEOUT:?}"))),
        };
        let running = self.running.as_mut().ok_or_else(|| VmExit::error("no machine"))?;
        running.machine.arm(entry).map_err(VmExit::error)?;
        crate::memory_trim::drop_text_pages();
        if paused {
            // So it can be saved, and nothing but a resume runs it.
            running.machine.pause().map_err(VmExit::error)?;
            if self.pause_reasons.is_empty() {
                self.pause_reasons.insert(PauseReason::User);
            }
        } else {
            running.machine.run().map_err(VmExit::error)?;
        }
        self.boots += 1;
        tracing::info!(from = description, boots = self.boots, "booting");
        self.booted_from = description;
        self.set_state(if paused { State::Paused } else { State::Running });
        Ok(())
    }

    /// Resets the machine and boots it again. Returns the exit if that ends the VM.
    ///
    /// # Errors
    /// A vCPU does not answer. The machine is not reset, and the VM runs on.
    pub(super) fn reset(&mut self, cause: &str) -> Result<Option<VmExit>, VcpuError> {
        let Some(running) = &self.running else {
            return Ok(None);
        };
        match running.machine.stop_vcpus() {
            Ok(_) => {}
            Err(MachineError::Vcpu(error @ VcpuError::Unresponsive(_))) => return Err(error),
            Err(error) => return Ok(Some(VmExit::error(error))),
        }
        if self.stop_precopy() {
            tracing::info!("the reset ends the live snapshot's copy of memory");
        }
        if let Some(Err(error)) = self.running.as_mut().map(|running| running.machine.reset()) {
            return Ok(Some(VmExit::error(error)));
        }
        self.soft_reboot = SoftReboot::No;
        self.deferred_reset = None;
        // No vCPU has run since: events still queued are from before the reset.
        self.mailbox.drop_events();
        self.stopped_disks.clear();
        self.deferred_pauses = PauseReasons::default();
        self.events.emit(Kind::Reset(pb::event::Reset {
            cause: cause.to_owned(),
        }));
        tracing::info!(cause, "machine reset");
        Ok(self.boot(self.state == State::Paused).err())
    }
}

/// The answer to a boot that failed. Internal if a restored machine may have begun to run (`ran`): its snapshot must
/// not be used again then.
pub(super) fn refusal(exit: &VmExit, ran: bool) -> Status {
    match ran {
        true => failed(&exit.detail),
        false => Status::failed_precondition(exit.detail.clone()),
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn machine_that_ran_in_part_is_told_from_one_that_did_not() {
        let exit = VmExit::error("vCPU 1 has ended");
        for (ran, code) in [(false, Code::FailedPrecondition), (true, Code::Internal)] {
            let status = refusal(&exit, ran);
            assert_eq!((status.code(), status.message()), (code, "vCPU 1 has ended"));
        }
    }
}
