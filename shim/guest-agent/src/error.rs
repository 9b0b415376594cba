//! Errors of commands.

use std::io;
use std::time::Duration;

/// Error of a command to the guest agent.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The agent does not have the command, or its configuration or a freeze has switched it off.
    #[error("the guest agent refuses {command}: {desc}")]
    CommandNotFound {
        command: &'static str,
        /// The agent's text, made visible.
        desc: String,
    },
    /// The agent carried out the command and reports an error.
    #[error("{command} failed in the guest: {desc} ({class})")]
    Agent {
        command: &'static str,
        /// QAPI's error class, made visible; usually `GenericError`.
        class: String,
        /// The agent's text, made visible.
        desc: String,
    },
    /// The agent did not answer `guest-sync-delimited`, so the command was not sent.
    #[error("the guest agent does not respond: {command} was not sent within {limit:?}")]
    Unresponsive { command: &'static str, limit: Duration },
    /// The command was sent, or part of it, and no reply came. It may still take effect.
    #[error("the guest agent did not answer {command} within {limit:?}")]
    Timeout { command: &'static str, limit: Duration },
    /// The stream has ended. Every later command fails in the same way.
    #[error("the connection to the guest agent is closed")]
    Disconnected(#[source] Option<io::Error>),
    /// The bytes that arrived are no reply to the command.
    #[error("the guest agent's reply to {command} is invalid: {fault}")]
    Protocol { command: &'static str, fault: Fault },
}

impl AgentError {
    /// True if the agent itself refused or failed the command, which shows that it works.
    #[must_use]
    pub fn is_from_agent(&self) -> bool {
        matches!(
            self,
            AgentError::CommandNotFound { .. } | AgentError::Agent { .. }
        )
    }

    /// True if the command may have taken effect in the guest, or may do so later.
    #[must_use]
    pub fn may_take_effect(&self) -> bool {
        !matches!(
            self,
            AgentError::CommandNotFound { .. } | AgentError::Agent { .. } | AgentError::Unresponsive { .. }
        )
    }
}

/// Reason why a reply is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A line is longer than this number of bytes.
    #[error("it is longer than {0} bytes")]
    TooLong(usize),
    /// More than this number of bytes arrived, and no reply was among them.
    #[error("{0} bytes arrived without a reply")]
    Flood(usize),
    /// This many replies to other synchronisations arrived.
    #[error("{0} replies to other synchronisations arrived before it")]
    StaleReplies(usize),
    /// Not JSON, or not of the command's type. The text is made visible.
    #[error("{0}")]
    Malformed(String),
    /// A JSON object without `return` and `error`.
    #[error("neither a result nor an error")]
    Empty,
    /// `guest-exec` returned a process id that is not positive.
    #[error("the process id {0} is not positive")]
    Pid(i64),
    /// Output of a process is not base64.
    #[error("the output of the process is not base64")]
    Base64,
}
