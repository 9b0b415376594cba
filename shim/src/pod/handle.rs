//! The handle to a pod's actor.

use tokio::sync::{mpsc, oneshot};

use super::command::PodCommand;
use super::container::{ContainerExit, ContainerPhase, ContainerStatus};
use super::task_error::{Reply, TaskError};

/// A handle on the actor.
#[derive(Debug, Clone)]
pub(crate) struct PodHandle {
    mailbox: mpsc::Sender<PodCommand>,
}

impl PodHandle {
    pub(super) fn new(mailbox: mpsc::Sender<PodCommand>) -> PodHandle {
        PodHandle { mailbox }
    }

    /// Sends a request and waits for the answer.
    pub(crate) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> PodCommand) -> Result<T, TaskError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.mailbox.send(command(reply)).await;
        sent.map_err(|_| TaskError::ended())?;
        answer.await.map_err(|_| TaskError::ended())?
    }

    /// Returns the state of a container, or of a process that was added to it if `exec_id` is not empty.
    pub(crate) async fn container_status(
        &self,
        id: String,
        exec_id: String,
    ) -> Result<ContainerStatus, TaskError> {
        match exec_id.is_empty() {
            true => self.ask(|reply| PodCommand::ContainerStatus(id, reply)).await,
            false => self.ask(|reply| PodCommand::ExecStatus(id, exec_id, reply)).await,
        }
    }

    /// Waits for the exit of a container, or of a process that was added to it.
    pub(crate) async fn exit(&self, id: String, exec_id: String) -> Result<ContainerExit, TaskError> {
        let mut changes = self.container_status(id, exec_id).await?.changes;
        let stopped = changes
            .wait_for(|phase| matches!(phase, ContainerPhase::Stopped(_)))
            .await;
        match stopped.map(|phase| *phase) {
            Ok(ContainerPhase::Stopped(exit)) => Ok(exit),
            // The container was never created.
            _ => Err(TaskError::not_found("the container is gone")),
        }
    }

    /// Pauses or resumes a VM. The actor handles other requests meanwhile.
    pub(crate) async fn pause(&self, id: String, pause: bool) -> Result<(), TaskError> {
        let seen = self
            .ask(|reply| PodCommand::ContainerStatus(id.clone(), reply))
            .await?;
        let Some(vm) = seen.vm else {
            let text = format!("container {id} is not a VM and cannot be paused");
            return Err(TaskError::unimplemented(text));
        };
        let done = if pause {
            vm.pause().await
        } else {
            vm.resume().await
        };
        done.map_err(|error| TaskError::precondition(error.to_string()))?;
        let _ = self.mailbox.send(PodCommand::Paused(id, pause)).await;
        Ok(())
    }
}
