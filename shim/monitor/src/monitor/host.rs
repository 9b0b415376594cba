//! A VM in a process that does more than that: the containerd shim's.

use std::io;

use husk_proto::shim::v1::Status as VmStatus;
use husk_vmi::VmPlan;
use tokio::sync::{oneshot, watch};

use super::attended::Attended;
use super::handle::VmHandle;
use super::remove;
use crate::console::Console;
use crate::launch::{Host, Report, Starter};
use crate::state::{RuntimeDir, StateError};
use crate::surroundings::Surroundings;

/// Why a VM could not be built or booted; nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
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
pub struct Hosted {
    /// What can be asked of it.
    pub vm: VmHandle,
    /// Its serial console, if it has one.
    pub console: Option<Console>,
    /// The VMM's process id.
    pub pid: u32,
    start: Option<(oneshot::Sender<()>, oneshot::Receiver<Report>)>,
}

impl Hosted {
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
        surroundings: Surroundings,
    ) -> Result<Hosted, HostError> {
        let claimed = runtime.claim(namespace, name)?;
        let attended = match Attended::new(plan, vmi, claimed.dir(), surroundings) {
            Ok(attended) => attended,
            Err(error) => {
                remove(claimed);
                return Err(error.into());
            }
        };
        let (vm, console) = (attended.handle.clone(), attended.console.clone());
        let (built, is_built) = oneshot::channel();
        let (boot, may_boot) = oneshot::channel();
        let (report, reported) = oneshot::channel();
        let starter = Starter::Host(Host {
            built: Some(built),
            boot: may_boot,
            report,
        });
        tokio::spawn(async move {
            let (ending, audience) = attended.live(starter).await;
            remove(claimed);
            audience.farewell(ending).await;
        });
        // Without a word on the machine there is one on why there is none.
        let Ok(pid) = is_built.await else {
            let status = final_status(vm.status()).await;
            return Err(HostError::Failed(said(reported, &status).await));
        };
        Ok(Hosted {
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
    pub async fn boot(&mut self) -> Result<(), HostError> {
        let Some((boot, reported)) = self.start.take() else {
            return Err(HostError::Failed("it was started before".into()));
        };
        let _ = boot.send(());
        match reported.await {
            Ok(Report::Running { .. }) => Ok(()),
            Ok(Report::Failed { message, .. }) => Err(HostError::Failed(message)),
            Err(_) => Err(HostError::Failed(self.vm.status().borrow().message.clone())),
        }
    }
}

/// The report on a start that failed, which comes before the status ends.
async fn said(reported: oneshot::Receiver<Report>, status: &VmStatus) -> String {
    match reported.await {
        Ok(Report::Failed { message, .. }) => message,
        _ => status.message.clone(),
    }
}

/// The last status of a VM, which it has when nothing of it is left.
pub async fn final_status(mut status: watch::Receiver<VmStatus>) -> VmStatus {
    while status.changed().await.is_ok() {}
    status.borrow().clone()
}
