//! What can be asked of a VM, by whoever hosts it and over gRPC.

use std::time::Duration;

use husk_proto::shim::v1::Status as VmStatus;
use husk_proto::vmm::v1 as vmm;
use tokio::sync::watch;

use super::vm::{RunningVmm, VmActorHandle};
use super::vm_error::VmError;
use super::vmm_connection::call_within;

/// How long the VMM may take for what it does at once.
const VMM_TIMEOUT: Duration = Duration::from_secs(30);

/// A handle on a VM.
#[derive(Debug, Clone)]
pub struct VmHandle {
    vm: VmActorHandle,
    vmm: watch::Receiver<Option<RunningVmm>>,
    status: watch::Receiver<VmStatus>,
}

impl VmHandle {
    pub(super) fn new(
        vm: VmActorHandle,
        vmm: watch::Receiver<Option<RunningVmm>>,
        status: watch::Receiver<VmStatus>,
    ) -> VmHandle {
        VmHandle { vm, vmm, status }
    }

    /// Its status, now and as it changes; the watch ends after a final one.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<VmStatus> {
        self.status.clone()
    }

    /// Begins a graceful end and tells the grace period in effect, in seconds.
    ///
    /// # Errors
    /// The VM has ended.
    pub async fn shutdown(&self, grace_seconds: Option<u64>) -> Result<u64, VmError> {
        self.vm.shutdown(grace_seconds).await.ok_or_else(VmError::ended)
    }

    /// Ends the VM at once.
    ///
    /// # Errors
    /// The VM has ended.
    pub async fn kill(&self) -> Result<(), VmError> {
        self.vm.kill().await.ok_or_else(VmError::ended)
    }

    /// Stops the vCPUs; returns when the status says so.
    ///
    /// # Errors
    /// The VM does not run, or its VMM does not answer.
    pub async fn pause(&self) -> Result<(), VmError> {
        call_within(VMM_TIMEOUT, self.vmm()?.client.pause(vmm::PauseRequest {})).await?;
        self.wait_for_paused(true).await
    }

    /// Undoes [`VmHandle::pause`].
    ///
    /// # Errors
    /// As for that.
    pub async fn resume(&self) -> Result<(), VmError> {
        call_within(VMM_TIMEOUT, self.vmm()?.client.resume(vmm::ResumeRequest {})).await?;
        self.wait_for_paused(false).await
    }

    /// Resets the machine in place.
    ///
    /// # Errors
    /// As for [`VmHandle::pause`].
    pub async fn reset(&self) -> Result<(), VmError> {
        call_within(VMM_TIMEOUT, self.vmm()?.client.reset(vmm::ResetRequest {})).await?;
        Ok(())
    }

    /// The VMM, while the VM runs.
    pub(super) fn running(&self) -> Option<RunningVmm> {
        self.vmm.borrow().clone()
    }

    fn vmm(&self) -> Result<RunningVmm, VmError> {
        self.running().ok_or_else(VmError::not_running)
    }

    /// Waits until a change the VMM has confirmed shows in the status too.
    async fn wait_for_paused(&self, paused: bool) -> Result<(), VmError> {
        let mut status = self.status.clone();
        // Where the VM ends meanwhile there is nothing to wait for.
        let _ = call_within(VMM_TIMEOUT, async {
            Ok(status.wait_for(|status| status.paused == paused).await.is_ok())
        })
        .await?;
        Ok(())
    }
}
