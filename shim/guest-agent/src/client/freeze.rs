//! Freezing and thawing as KubeVirt does, with the timer of a [`FreezeGuard`].

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use super::{GuestAgent, limit};
use crate::error::AgentError;
use crate::freeze::FreezeGuard;
use crate::types::FsFreezeStatus;

impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
    /// Freezes the guest's file systems, unless they are frozen: that succeeds and leaves the timer alone. `timeout`:
    /// when `guard` says that a thaw is due, see [`FreezeGuard::timeout`].
    ///
    /// # Errors
    /// See [`AgentError`]. The guard stays set if the freeze may have taken effect.
    pub async fn freeze(
        &mut self,
        guard: &mut FreezeGuard,
        timeout: Option<Duration>,
        limit: Duration,
    ) -> Result<(), AgentError> {
        if self.fsfreeze_status(limit.min(limit::QUERY)).await? == FsFreezeStatus::Frozen {
            return Ok(());
        }
        guard.freezing(Instant::now().into_std(), timeout);
        let frozen = self.fsfreeze_freeze(limit).await;
        if frozen.as_ref().is_err_and(|error| !error.may_take_effect()) {
            guard.freeze_refused();
        }
        frozen.map(drop)
    }

    /// Thaws the guest's file systems, unless the agent says that they are thawed: a thaw runs the guest's hooks.
    ///
    /// # Errors
    /// See [`AgentError`]. The guard stays set.
    pub async fn thaw(&mut self, guard: &mut FreezeGuard, limit: Duration) -> Result<(), AgentError> {
        let status = self.fsfreeze_status(limit.min(limit::QUERY)).await;
        let thawed = match status {
            Ok(FsFreezeStatus::Thawed) => Ok(()),
            // Without a status as well: nothing is lost by an attempt.
            _ => self.fsfreeze_thaw(limit).await.map(drop),
        };
        match thawed {
            Ok(()) => guard.thawed(),
            Err(_) => guard.thaw_failed(Instant::now().into_std()),
        }
        thawed
    }
}
