//! `guest-exec` and `guest-exec-status`.

use std::time::Duration;

use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Call, GuestAgent, MAX_EXEC_REPLY};
use crate::error::{AgentError, Fault};
use crate::types::{Exec, ExecStatus, RawStatus, Started};

impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
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
    /// See [`AgentError`]. An output of more than 3 MiB is [`Fault::TooLong`], and lost.
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
