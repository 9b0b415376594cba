//! The queries of the [`Poller`](crate::Poller).

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

use super::GuestAgent;
use crate::error::AgentError;
use crate::poller::{Answer, Query};
use crate::types::System;

impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
    /// Asks what the poller wants to know. `limit` is that of each command.
    ///
    /// # Errors
    /// See [`AgentError`]. Commands of [`Query::System`] that the agent refuses, or answers late or badly, leave their
    /// part out instead.
    pub async fn query(&mut self, query: Query, limit: Duration) -> Result<Answer, AgentError> {
        Ok(match query {
            Query::Version => Answer::Version(self.info(limit).await?),
            Query::FileSystems => Answer::FileSystems(self.file_systems(limit).await?),
            Query::FsFreezeStatus => Answer::FsFreezeStatus(self.fsfreeze_status(limit).await?),
            Query::Users => Answer::Users(self.users(limit).await?),
            Query::Load => Answer::Load(self.load(limit).await?),
            // Last the reply that may be long, or take long.
            Query::System => Answer::System(Box::new(System {
                os: part(self.os_info(limit).await)?,
                host_name: part(self.host_name(limit).await)?,
                time_zone: part(self.time_zone(limit).await)?,
                interfaces: part(self.network_interfaces(limit).await)?,
            })),
        })
    }
}

/// A part of an answer. An error after which the agent may answer another command leaves the part out.
fn part<T>(result: Result<T, AgentError>) -> Result<Option<T>, AgentError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error @ (AgentError::Disconnected(_) | AgentError::Unresponsive { .. })) => Err(error),
        Err(_) => Ok(None),
    }
}
