//! The handle to the actor of the guest's agent.

use std::time::{Duration, Instant};

use husk_guest_agent::{AgentError, Answers, Exec, ExecOutput, Fault, FreezeGuard};
use husk_proto::shim::v1::{CredentialsState, GuestInfoResponse, GuestState};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::to_proto::info;
use crate::monitor::vm_error::VmError;

pub(super) type Reply<T> = oneshot::Sender<Result<T, VmError>>;

pub(super) enum AgentCommand {
    Exec(Exec, Reply<ExecOutput>),
    /// Thawed after this time, if there is one.
    Freeze(Option<Duration>, Reply<Frozen>),
    Thaw(Reply<bool>),
    Ping(Reply<()>),
    /// These replace all public keys of the user.
    SetKeys {
        user: String,
        keys: Vec<String>,
        reply: Reply<()>,
    },
    /// Publishes the result of the last attempt to set the access credentials.
    Synchronized(CredentialsState),
    SetPassword {
        user: String,
        password: Vec<u8>,
        reply: Reply<()>,
    },
}

/// A freeze that succeeded.
#[derive(Debug, Clone, Copy)]
pub(in crate::monitor) struct Frozen {
    /// The file systems were frozen before.
    pub(in crate::monitor) already: bool,
    /// When they are thawed; `None` if something else has frozen them.
    pub(in crate::monitor) thaw_at: Option<Instant>,
}

/// The state of the agent.
#[derive(Debug, Clone, Default)]
pub(super) struct AgentView {
    pub(super) connected: bool,
    /// When the monitor thaws file systems that are frozen.
    pub(super) thaw_at: Option<Instant>,
    pub(super) answers: Answers,
}

/// A handle to the guest's agent.
#[derive(Debug, Clone)]
pub struct AgentHandle {
    mailbox: mpsc::Sender<AgentCommand>,
    view: watch::Receiver<AgentView>,
    state: watch::Receiver<GuestState>,
}

impl AgentHandle {
    pub(super) fn new(
        mailbox: mpsc::Sender<AgentCommand>,
        view: watch::Receiver<AgentView>,
        state: watch::Receiver<GuestState>,
    ) -> AgentHandle {
        AgentHandle { mailbox, view, state }
    }

    /// Watches the state that a VMI's status shows.
    pub(in crate::monitor) fn watch(&self) -> watch::Receiver<GuestState> {
        self.state.clone()
    }

    /// The last report of the agent.
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

    /// Publishes the result of the last attempt to set the access credentials.
    pub(in crate::monitor) async fn synchronized(&self, state: CredentialsState) {
        let _ = self.mailbox.send(AgentCommand::Synchronized(state)).await;
    }

    /// Freezes the guest's file systems, which are thawed after `timeout`, if there is one.
    pub(in crate::monitor) async fn freeze(&self, timeout: Option<Duration>) -> Result<Frozen, VmError> {
        self.ask(|reply| AgentCommand::Freeze(timeout, reply)).await
    }

    /// Asks the agent for a sign of life. Succeeds for a VM that was paused on purpose.
    ///
    /// # Errors
    /// There is no agent, or it does not answer.
    pub async fn ping(&self) -> Result<(), VmError> {
        self.ask(AgentCommand::Ping).await
    }

    /// Runs a program in the guest for at most `limit`, and returns its exit status and standard output.
    ///
    /// # Errors
    /// There is no agent, it refuses, or the program runs on.
    pub async fn run(
        &self,
        program: String,
        arguments: Vec<String>,
        limit: Duration,
    ) -> Result<(i32, Vec<u8>), VmError> {
        let output = self.exec(Exec::new(program, arguments), limit).await?;
        Ok((exit_status(&output)?, output.stdout))
    }

    /// Freezes the guest's file systems, which are thawed after `seconds` as [`FreezeGuard::timeout`] has them.
    /// Succeeds if they are frozen already.
    ///
    /// # Errors
    /// There is no agent, or it refuses or does not do it in time.
    pub async fn freeze_for(&self, seconds: i32) -> Result<(), VmError> {
        self.freeze(FreezeGuard::timeout(seconds)).await.map(drop)
    }

    /// True if an agent has told its version since the guest has booted.
    #[must_use]
    pub fn has_answered(&self) -> bool {
        self.view.borrow().answers.version.is_some()
    }

    /// Replaces the public keys with which a user of the guest can log in.
    pub(in crate::monitor) async fn set_keys(&self, user: &str, keys: Vec<String>) -> Result<(), VmError> {
        let user = user.to_owned();
        self.ask(|reply| AgentCommand::SetKeys { user, keys, reply })
            .await
    }

    /// Sets the password of a user of the guest.
    pub(in crate::monitor) async fn set_password(
        &self,
        user: &str,
        password: Vec<u8>,
    ) -> Result<(), VmError> {
        let user = user.to_owned();
        self.ask(|reply| AgentCommand::SetPassword {
            user,
            password,
            reply,
        })
        .await
    }

    /// Thaws the guest's file systems. Returns false if they were thawed already.
    ///
    /// # Errors
    /// There is no agent, or it refuses or does not answer.
    pub async fn thaw(&self) -> Result<bool, VmError> {
        self.ask(AgentCommand::Thaw).await
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> AgentCommand) -> Result<T, VmError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.mailbox.send(command(reply)).await;
        sent.map_err(|_| VmError::ended())?;
        answer.await.map_err(|_| VmError::ended())?
    }
}

/// The exit status of a program: 128 + N if signal N ended it.
pub(super) fn exit_status(output: &ExecOutput) -> Result<i32, VmError> {
    let signal = output.signal.map(|signal| signal.saturating_add(128));
    let status = output.exit_code.or(signal);
    let status =
        status.ok_or_else(|| VmError::unavailable("the guest agent does not say how the command ended"))?;
    Ok(i32::try_from(status).unwrap_or(i32::MAX))
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
