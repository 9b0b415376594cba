//! Freezing and thawing as KubeVirt does, with the timer of a [`FreezeGuard`].

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::{GuestAgent, limit};
use crate::error::AgentError;
use crate::freeze::FreezeGuard;
use crate::types::FsFreezeStatus;

impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
    /// Freezes the guest's file systems after which `guard` says in `timeout` that a thaw is due. Returns false if they
    /// were frozen already: then the timer stays as it is.
    ///
    /// # Errors
    /// See [`AgentError`]. The guard stays set if the freeze may have taken effect.
    pub async fn freeze(
        &mut self,
        guard: &mut FreezeGuard,
        timeout: Option<Duration>,
        limit: Duration,
    ) -> Result<bool, AgentError> {
        if self.fsfreeze_status(limit.min(limit::QUERY)).await? == FsFreezeStatus::Frozen {
            return Ok(false);
        }
        guard.freezing(Instant::now().into_std(), timeout);
        let frozen = self.fsfreeze_freeze(limit).await;
        match &frozen {
            Err(error) if !error.may_take_effect() => guard.freeze_refused(),
            // The caller does not know that it has to thaw them.
            Err(_) if timeout.is_none() => {
                guard.freezing(Instant::now().into_std(), Some(FreezeGuard::DEFAULT_TIMEOUT));
            }
            _ => {}
        }
        frozen.map(|_| true)
    }

    /// Thaws the guest's file systems. Returns false if the agent says that they were thawed: a thaw would run the guest's
    /// hooks.
    ///
    /// # Errors
    /// See [`AgentError`]. The guard stays set.
    pub async fn thaw(&mut self, guard: &mut FreezeGuard, limit: Duration) -> Result<bool, AgentError> {
        let status = self.fsfreeze_status(limit.min(limit::QUERY)).await;
        let thawed = match status {
            Ok(FsFreezeStatus::Thawed) => Ok(false),
            // Without a status as well: nothing is lost by an attempt.
            _ => self.fsfreeze_thaw(limit).await.map(|_| true),
        };
        match thawed {
            Ok(_) => guard.thawed(),
            Err(_) => guard.thaw_failed(Instant::now().into_std()),
        }
        thawed
    }
}
