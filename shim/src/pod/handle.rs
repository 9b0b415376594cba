//! The way to a pod's actor.

use tokio::sync::{mpsc, oneshot};

use super::{Command, Exit, Phase, Refusal, Reply};

/// A handle on the actor.
#[derive(Debug, Clone)]
pub(crate) struct PodHandle {
    mailbox: mpsc::Sender<Command>,
}

impl PodHandle {
    pub(super) fn new(mailbox: mpsc::Sender<Command>) -> PodHandle {
        PodHandle { mailbox }
    }

    /// The answer to a question.
    pub(crate) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        let sent = self.mailbox.send(command(reply)).await;
        sent.map_err(|_| Refusal::ended())?;
        answer.await.map_err(|_| Refusal::ended())?
    }

    /// How a container ends, once it has.
    pub(crate) async fn exit(&self, id: String) -> Result<Exit, Refusal> {
        let mut changes = self.ask(|reply| Command::Look(id, reply)).await?.changes;
        let stopped = changes.wait_for(|phase| matches!(phase, Phase::Stopped(_))).await;
        match stopped.map(|phase| *phase) {
            Ok(Phase::Stopped(exit)) => Ok(exit),
            // It was never created.
            _ => Err(Refusal::not_found("the container is gone")),
        }
    }

    /// Pauses a VM, or resumes it. The actor goes on meanwhile.
    pub(crate) async fn pause(&self, id: String, pause: bool) -> Result<(), Refusal> {
        let seen = self.ask(|reply| Command::Look(id.clone(), reply)).await?;
        let Some(vm) = seen.vm else {
            let text = format!("container {id} is no VM, and has nothing to pause");
            return Err(Refusal::unimplemented(text));
        };
        let done = if pause {
            vm.pause().await
        } else {
            vm.resume().await
        };
        done.map_err(|status| Refusal::precondition(status.message()))?;
        let _ = self.mailbox.send(Command::Paused(id, pause)).await;
        Ok(())
    }
}
