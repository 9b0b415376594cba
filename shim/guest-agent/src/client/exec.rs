//! `guest-exec` and `guest-exec-status`.

use std::time::Duration;

use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep_until};

use super::{Call, GuestAgent, LONGEST, MAX_EXEC_REPLY, limit};
use crate::error::{AgentError, Fault};
use crate::types::{Exec, ExecOutput, ExecStatus, RawStatus, Started};

/// Time between two queries of a process's status: the first, and the longest, which is at most a tenth of the limit.
/// It doubles.
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_millis(250);

impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
    /// Runs a process in the guest and waits for its end.
    ///
    /// # Errors
    /// [`AgentError::StillRunning`] after `limit`: the agent cannot kill it. An output of more than 3 MiB is
    /// [`Fault::TooLong`], and lost. See [`AgentError`].
    pub async fn exec(&mut self, exec: &Exec, limit: Duration) -> Result<ExecOutput, AgentError> {
        let deadline = Instant::now() + limit.min(LONGEST);
        let pid = self.exec_start(exec, limit).await?;
        let longest = LONGEST_WAIT.min(limit / 10).max(FIRST_WAIT);
        let mut wait = FIRST_WAIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(AgentError::StillRunning { pid, limit });
            }
            match self.exec_status(pid, left.min(limit::QUERY)).await {
                Ok(ExecStatus::Exited(output)) => return Ok(output),
                Ok(ExecStatus::Running) => {}
                // Of the limits that of the process is over as well, and the caller knows that one.
                Err(AgentError::Timeout { .. } | AgentError::Unresponsive { .. })
                    if Instant::now() >= deadline =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            }
            sleep_until(deadline.min(Instant::now() + wait)).await;
            wait = (wait * 2).min(longest);
        }
    }

    /// `guest-exec`: starts a process and returns its id.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn exec_start(&mut self, exec: &Exec, limit: Duration) -> Result<i64, AgentError> {
        let call = Call::new("guest-exec", limit);
        let started: Started = self.call(call, Some(exec)).await?;
        if started.pid > 0 {
            Ok(started.pid)
        } else {
            Err(call.fault(Fault::Pid(started.pid)))
        }
    }

    /// `guest-exec-status` of a process that [`GuestAgent::exec_start`] started.
    ///
    /// # Errors
    /// As of [`GuestAgent::exec`].
    pub async fn exec_status(&mut self, pid: i64, limit: Duration) -> Result<ExecStatus, AgentError> {
        #[derive(Serialize)]
        struct Pid {
            pid: i64,
        }
        let mut call = Call::new("guest-exec-status", limit);
        call.max_reply = MAX_EXEC_REPLY;
        let raw: RawStatus = self.call(call, Some(Pid { pid })).await?;
        raw.try_into().map_err(|fault| call.fault(fault))
    }
}
