//! A VM embedded in another process: the containerd shim.

use std::io;

use husk_proto::shim::v1::Status as VmStatus;
use husk_vmi::VmPlan;
use tokio::sync::{oneshot, watch};

use super::guest_agent::AgentHandle;
use super::handle::VmHandle;
use super::pending_vm::PendingVm;
use super::supervisor::{Supervisor, remove_dir};
use crate::console::Console;
use crate::launch::{EmbeddedStart, StartMode, StartReport};
use crate::state::{ClaimedDir, RuntimeDir, StateError};
use crate::vm_environment::VmEnvironment;

/// An error of building or booting a VM. Everything has been cleaned up.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedVmError {
    /// An error of its directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// An error of writing to its directory.
    #[error("the VM's state cannot be kept")]
    Keep(#[from] io::Error),
    /// Another error.
    #[error("{0}")]
    Failed(String),
}

/// A VM whose machine is built.
#[derive(Debug)]
pub struct EmbeddedVm {
    /// The handle to the VM.
    pub vm: VmHandle,
    /// The handle to the guest's agent.
    pub agent: AgentHandle,
    /// Its serial console, if it has one.
    pub console: Option<Console>,
    /// The VMM's process id.
    pub pid: u32,
    start: Option<(oneshot::Sender<()>, oneshot::Receiver<StartReport>)>,
}

impl EmbeddedVm {
    /// Builds the machine of a plan. Its directory in `runtime` has these two names. Must be called on a
    /// single-threaded tokio runtime that outlives the VM.
    ///
    /// # Errors
    /// The machine cannot be built. Everything has been cleaned up.
    pub async fn build(
        runtime: &RuntimeDir,
        (namespace, name): (&str, &str),
        plan: VmPlan,
        vmi: &serde_json::Value,
        environment: VmEnvironment,
    ) -> Result<EmbeddedVm, EmbeddedVmError> {
        let never = std::future::pending();
        EmbeddedVm::build_until(never, runtime, (namespace, name), plan, vmi, environment).await
    }

    /// As [`EmbeddedVm::build`]. The VM is killed if `stop` completes before it is built.
    ///
    /// # Errors
    /// The machine cannot be built, or was killed. Everything has been cleaned up.
    pub async fn build_until(
        stop: impl Future<Output = ()>,
        runtime: &RuntimeDir,
        (namespace, name): (&str, &str),
        plan: VmPlan,
        vmi: &serde_json::Value,
        environment: VmEnvironment,
    ) -> Result<EmbeddedVm, EmbeddedVmError> {
        let claimed = runtime.claim(namespace, name)?;
        EmbeddedVm::build_in(claimed, plan, vmi, environment, stop).await
    }

    /// As [`EmbeddedVm::build_until`], in the place of a pod that waited for its VMI.
    ///
    /// # Errors
    /// The machine cannot be built, or was killed. Everything has been cleaned up, and nothing serves the pod's socket.
    pub async fn build_pending(
        pending: PendingVm,
        plan: VmPlan,
        vmi: &serde_json::Value,
        environment: VmEnvironment,
        stop: impl Future<Output = ()>,
    ) -> Result<EmbeddedVm, EmbeddedVmError> {
        EmbeddedVm::build_in(pending.into_claim(), plan, vmi, environment, stop).await
    }

    async fn build_in(
        claimed: ClaimedDir,
        plan: VmPlan,
        vmi: &serde_json::Value,
        environment: VmEnvironment,
        stop: impl Future<Output = ()>,
    ) -> Result<EmbeddedVm, EmbeddedVmError> {
        let supervisor = match Supervisor::new(plan, vmi, claimed.dir(), environment, None) {
            Ok(supervisor) => supervisor,
            Err(error) => {
                remove_dir(claimed);
                return Err(error.into());
            }
        };
        let (vm, console) = (supervisor.handle.clone(), supervisor.console.clone());
        let agent = supervisor.agent_handle.clone();
        let (built, mut is_built) = oneshot::channel();
        let (boot, may_boot) = oneshot::channel();
        let (report, reported) = oneshot::channel();
        let start_mode = StartMode::Embedded(EmbeddedStart {
            built: Some(built),
            boot: may_boot,
            report,
        });
        tokio::spawn(async move {
            let (final_status, status_server) = supervisor.run(start_mode).await;
            remove_dir(claimed);
            status_server.publish_final(final_status).await;
        });
        let pid = tokio::select! {
            pid = &mut is_built => pid,
            () = stop => {
                // If it has ended, it is not built either.
                let _ = vm.kill().await;
                is_built.await
            }
        };
        // If the machine is not built, there is a report of the error.
        let Ok(pid) = pid else {
            let status = final_status(vm.status()).await;
            return Err(EmbeddedVmError::Failed(said(reported, &status).await));
        };
        Ok(EmbeddedVm {
            vm,
            agent,
            console,
            pid,
            start: Some((boot, reported)),
        })
    }

    /// Boots the machine. May be called once.
    ///
    /// # Errors
    /// The VM does not run. Its status shows the end.
    pub async fn boot(&mut self) -> Result<(), EmbeddedVmError> {
        let Some((boot, reported)) = self.start.take() else {
            return Err(EmbeddedVmError::Failed("it was already started".into()));
        };
        let _ = boot.send(());
        match reported.await {
            Ok(StartReport::Running { .. }) => Ok(()),
            Ok(StartReport::Failed { message, .. }) => Err(EmbeddedVmError::Failed(message)),
            Err(_) => Err(EmbeddedVmError::Failed(self.vm.status().borrow().message.clone())),
        }
    }
}

/// Returns the error of a failed start, which is reported before the status ends.
async fn said(reported: oneshot::Receiver<StartReport>, status: &VmStatus) -> String {
    match reported.await {
        Ok(StartReport::Failed { message, .. }) => message,
        _ => status.message.clone(),
    }
}

/// Waits for the final status of a VM. Everything has been cleaned up then.
pub async fn final_status(mut status: watch::Receiver<VmStatus>) -> VmStatus {
    while status.changed().await.is_ok() {}
    status.borrow().clone()
}
