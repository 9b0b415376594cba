//! The handle to the actor of the guest's agent.

use std::time::{Duration, Instant};

use husk_guest_agent::{AgentError, Answers, Exec, ExecOutput, Fault};
use husk_proto::shim::v1::GuestInfoResponse;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::to_proto::info;
use crate::monitor::vm_error::VmError;

pub(super) type Reply<T> = oneshot::Sender<Result<T, VmError>>;

pub(super) enum AgentCommand {
    Exec(Exec, Reply<ExecOutput>),
    Freeze(Duration, Reply<Frozen>),
    Thaw(Reply<bool>),
}

/// A freeze that succeeded.
#[derive(Debug, Clone, Copy)]
pub(in crate::monitor) struct Frozen {
    /// The file systems were frozen before.
    pub(in crate::monitor) already: bool,
    /// When they are thawed; `None` if something else has frozen them.
    pub(in crate::monitor) thaw_at: Option<Instant>,
}

/// What is known of the agent.
#[derive(Debug, Clone, Default)]
pub(super) struct AgentView {
    pub(super) connected: bool,
    /// When the monitor thaws file systems that are frozen.
    pub(super) thaw_at: Option<Instant>,
    pub(super) answers: Answers,
}

/// A handle to the actor.
#[derive(Debug, Clone)]
pub(in crate::monitor) struct AgentHandle {
    mailbox: mpsc::Sender<AgentCommand>,
    view: watch::Receiver<AgentView>,
}

impl AgentHandle {
    pub(super) fn new(mailbox: mpsc::Sender<AgentCommand>, view: watch::Receiver<AgentView>) -> AgentHandle {
        AgentHandle { mailbox, view }
    }

    /// What the agent has told last.
    pub(in crate::monitor) fn info(&self) -> GuestInfoResponse {
        info(&self.view.borrow(), Instant::now())
    }

    /// Runs a process in the guest and waits for its end, for at most `limit`.
    pub(in crate::monitor) async fn exec(&self, exec: Exec, limit: Duration) -> Result<ExecOutput, VmError> {
        let done = timeout(limit, self.ask(|reply| AgentCommand::Exec(exec, reply))).await;
        let late = |_| {
            let text = format!("the command did not end within {limit:?}; if it was started, it runs on");
            VmError::timed_out(text)
        };
        done.map_err(late)?
    }

    /// Freezes the guest's file systems, which are thawed after `timeout`.
    pub(in crate::monitor) async fn freeze(&self, timeout: Duration) -> Result<Frozen, VmError> {
        self.ask(|reply| AgentCommand::Freeze(timeout, reply)).await
    }

    /// Thaws them. Returns false if they were thawed already.
    pub(in crate::monitor) async fn thaw(&self) -> Result<bool, VmError> {
        self.ask(AgentCommand::Thaw).await
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> AgentCommand) -> Result<T, VmError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.mailbox.send(command(reply)).await;
        sent.map_err(|_| VmError::ended())?;
        answer.await.map_err(|_| VmError::ended())?
    }
}

impl From<AgentError> for VmError {
    fn from(error: AgentError) -> VmError {
        let text = error.to_string();
        match error {
            AgentError::Protocol {
                command: "guest-exec-status",
                fault: Fault::TooLong(_),
            } => VmError::limit_reached("the output is longer than 3 MiB, and lost"),
            AgentError::CommandNotFound { .. } | AgentError::Agent { .. } => VmError::wrong_state(text),
            AgentError::Unresponsive { .. } | AgentError::Timeout { .. } => VmError::timed_out(text),
            AgentError::Disconnected(_) | AgentError::Protocol { .. } => VmError::unavailable(text),
        }
    }
}
