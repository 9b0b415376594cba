//! A VM in a process that does more than that: the containerd shim's.

use std::io;

use husk_proto::shim::v1::Status as VmStatus;
use husk_vmi::VmPlan;
use tokio::sync::{oneshot, watch};

use super::handle::VmHandle;
use super::supervisor::{Supervisor, remove_dir};
use crate::console::Console;
use crate::launch::{EmbeddedStart, StartMode, StartReport};
use crate::state::{RuntimeDir, StateError};
use crate::vm_environment::VmEnvironment;

/// Why a VM could not be built or booted; nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddedVmError {
    /// Its state directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// What is kept in there.
    #[error("the VM's state cannot be kept")]
    Keep(#[from] io::Error),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

/// A VM whose machine is built.
#[derive(Debug)]
pub struct EmbeddedVm {
    /// What can be asked of it.
    pub vm: VmHandle,
    /// Its serial console, if it has one.
    pub console: Option<Console>,
    /// The VMM's process id.
    pub pid: u32,
    start: Option<(oneshot::Sender<()>, oneshot::Receiver<StartReport>)>,
}

impl EmbeddedVm {
    /// Builds the machine of a plan, whose state is in `runtime` by these two names. On a tokio runtime of one thread,
    /// which ends after the VM.
    ///
    /// # Errors
    /// The VM cannot be; whatever was made for it is gone.
    pub async fn build(
        runtime: &RuntimeDir,
        (namespace, name): (&str, &str),
        plan: VmPlan,
        vmi: &serde_json::Value,
        environment: VmEnvironment,
    ) -> Result<EmbeddedVm, EmbeddedVmError> {
        let claimed = runtime.claim(namespace, name)?;
        let supervisor = match Supervisor::new(plan, vmi, claimed.dir(), environment) {
            Ok(supervisor) => supervisor,
            Err(error) => {
                remove_dir(claimed);
                return Err(error.into());
            }
        };
        let (vm, console) = (supervisor.handle.clone(), supervisor.console.clone());
        let (built, is_built) = oneshot::channel();
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
        // Without a word on the machine there is one on why there is none.
        let Ok(pid) = is_built.await else {
            let status = final_status(vm.status()).await;
            return Err(EmbeddedVmError::Failed(said(reported, &status).await));
        };
        Ok(EmbeddedVm {
            vm,
            console,
            pid,
            start: Some((boot, reported)),
        })
    }

    /// Boots it. Once.
    ///
    /// # Errors
    /// It does not run, and its end shows in the status.
    pub async fn boot(&mut self) -> Result<(), EmbeddedVmError> {
        let Some((boot, reported)) = self.start.take() else {
            return Err(EmbeddedVmError::Failed("it was started before".into()));
        };
        let _ = boot.send(());
        match reported.await {
            Ok(StartReport::Running { .. }) => Ok(()),
            Ok(StartReport::Failed { message, .. }) => Err(EmbeddedVmError::Failed(message)),
            Err(_) => Err(EmbeddedVmError::Failed(self.vm.status().borrow().message.clone())),
        }
    }
}

/// The report on a start that failed, which comes before the status ends.
async fn said(reported: oneshot::Receiver<StartReport>, status: &VmStatus) -> String {
    match reported.await {
        Ok(StartReport::Failed { message, .. }) => message,
        _ => status.message.clone(),
    }
}

/// The last status of a VM, which it has when nothing of it is left.
pub async fn final_status(mut status: watch::Receiver<VmStatus>) -> VmStatus {
    while status.changed().await.is_ok() {}
    status.borrow().clone()
}
