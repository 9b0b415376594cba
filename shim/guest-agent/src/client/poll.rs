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
    /// See [`AgentError`]. Commands of [`Query::System`] that the agent refuses leave their part out instead.
    pub async fn query(&mut self, query: Query, limit: Duration) -> Result<Answer, AgentError> {
        Ok(match query {
            Query::Version => Answer::Version(self.info(limit).await?),
            Query::FileSystems => Answer::FileSystems(self.file_systems(limit).await?),
            Query::FsFreezeStatus => Answer::FsFreezeStatus(self.fsfreeze_status(limit).await?),
            Query::Users => Answer::Users(self.users(limit).await?),
            Query::Load => Answer::Load(self.load(limit).await?),
            Query::System => Answer::System(Box::new(System {
                interfaces: unless_refused(self.network_interfaces(limit).await)?,
                os: unless_refused(self.os_info(limit).await)?,
                host_name: unless_refused(self.host_name(limit).await)?,
                time_zone: unless_refused(self.time_zone(limit).await)?,
            })),
        })
    }
}

fn unless_refused<T>(result: Result<T, AgentError>) -> Result<Option<T>, AgentError> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.is_from_agent() => Ok(None),
        Err(error) => Err(error),
    }
}
