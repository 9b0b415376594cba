//! Operations on a VM, for the embedding process and over gRPC.

use std::time::Duration;

use husk_proto::shim::v1::{SnapshotProgress, Status as VmStatus};
use husk_proto::vmm::v1 as vmm;
use tokio::sync::{mpsc, watch};

use super::snapshots::{SnapshotOptions, SnapshotsHandle};
use super::status::PAUSED_IO_ERROR;
use super::vm::{RunningVmm, VmActorHandle};
use super::vm_error::VmError;
use super::vmm_connection::call_within;

/// Maximum time for the VMM to answer.
pub(super) const VMM_TIMEOUT: Duration = Duration::from_secs(30);

/// A handle to a VM.
#[derive(Debug, Clone)]
pub struct VmHandle {
    vm: VmActorHandle,
    vmm: watch::Receiver<Option<RunningVmm>>,
    status: watch::Receiver<VmStatus>,
    snapshots: SnapshotsHandle,
}

impl VmHandle {
    pub(super) fn new(
        vm: VmActorHandle,
        vmm: watch::Receiver<Option<RunningVmm>>,
        status: watch::Receiver<VmStatus>,
        snapshots: SnapshotsHandle,
    ) -> VmHandle {
        VmHandle {
            vm,
            vmm,
            status,
            snapshots,
        }
    }

    /// Watches the status. The watch ends after the final status.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<VmStatus> {
        self.status.clone()
    }

    /// Starts a graceful shutdown. Returns the grace period in effect, in seconds.
    ///
    /// # Errors
    /// The VM has ended.
    pub async fn shutdown(&self, grace_seconds: Option<u64>) -> Result<u64, VmError> {
        self.vm.shutdown(grace_seconds).await.ok_or_else(VmError::ended)
    }

    /// Kills the VM.
    ///
    /// # Errors
    /// The VM has ended.
    pub async fn kill(&self) -> Result<(), VmError> {
        self.vm.kill().await.ok_or_else(VmError::ended)
    }

    /// Stops the vCPUs. Returns when the status shows it.
    ///
    /// # Errors
    /// The VM is not running, or its VMM does not answer.
    pub async fn pause(&self) -> Result<(), VmError> {
        call_within(
            VMM_TIMEOUT,
            self.vmm()?.client.pause(vmm::PauseRequest::default()),
        )
        .await?;
        let mut status = self.status.clone();
        call_within(VMM_TIMEOUT, async {
            // If the VM ends meanwhile there is nothing to wait for.
            let _ = status.wait_for(|status| status.paused).await;
            Ok(())
        })
        .await
    }

    /// Resumes a paused VM. Returns when the status shows it, or that an I/O error has paused the VM again.
    ///
    /// # Errors
    /// As for [`VmHandle::pause`]; also if a snapshot is being made, or one cannot be told that the VM goes on.
    pub async fn resume(&self) -> Result<(), VmError> {
        let mut status = self.status.clone();
        status.mark_unchanged();
        self.vmm()?;
        self.snapshots.resume().await?;
        if !status.borrow().paused {
            return Ok(());
        }
        // An I/O error may pause the VM again before this task sees it run.
        call_within(VMM_TIMEOUT, async {
            let _ = status.changed().await;
            let resumed = |status: &VmStatus| !status.paused || status.reason == PAUSED_IO_ERROR;
            let _ = status.wait_for(resumed).await;
            Ok(())
        })
        .await
    }

    /// Makes a snapshot. Its progress and result come from the channel; dropping it ends the snapshot.
    ///
    /// # Errors
    /// The VM has ended.
    pub(super) async fn snapshot(
        &self,
        options: SnapshotOptions,
    ) -> Result<mpsc::Receiver<Result<SnapshotProgress, tonic::Status>>, VmError> {
        self.snapshots.make(options).await
    }

    /// Resets the machine.
    ///
    /// # Errors
    /// As for [`VmHandle::pause`].
    pub async fn reset(&self) -> Result<(), VmError> {
        call_within(VMM_TIMEOUT, self.vmm()?.client.reset(vmm::ResetRequest {})).await?;
        Ok(())
    }

    /// Presses the power button. If the guest then powers off, the machine is reset.
    ///
    /// # Errors
    /// As for [`VmHandle::pause`]; also if the VM is paused or is being shut down.
    pub async fn soft_reboot(&self) -> Result<(), VmError> {
        self.vmm()?;
        self.vm.soft_reboot().await.ok_or_else(VmError::ended)?
    }

    /// Returns the VMM while the VM runs.
    pub(super) fn running(&self) -> Option<RunningVmm> {
        self.vmm.borrow().clone()
    }

    fn vmm(&self) -> Result<RunningVmm, VmError> {
        self.running().ok_or_else(VmError::not_running)
    }
}
