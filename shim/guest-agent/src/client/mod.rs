//! The stream, its synchronisation, and one command at a time on it.

mod commands;
mod exec;
mod freeze;
pub mod limit;
mod poll;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};
use uuid::Uuid;

use crate::decoder::{LineDecoder, Mode, SENTINEL};
use crate::error::{AgentError, Fault};
use crate::reply;

/// Longest reply to a query, in bytes.
const MAX_REPLY: usize = 1 << 20;

/// Longest reply to `guest-exec-status`, in bytes: 3 MiB of output.
const MAX_EXEC_REPLY: usize = 4 << 20;

/// Longest reply to `guest-sync-delimited`, in bytes.
const MAX_SYNC_REPLY: usize = 256;

/// Blank lines and unfinished ones that may come before a reply, in bytes.
const MAX_NOISE: usize = 64 << 10;

/// Maximum number of bytes to skip in search of the sentinel. The late reply to a command that timed out may be 44 MiB
/// long: both outputs of a process, in base64.
const MAX_SKIPPED: usize = 64 << 20;

/// Replies to other synchronisations that are read before one is given up. An agent that was not running finds those of
/// all the time before in its port.
const MAX_STALE_REPLIES: usize = 4096;

/// Time after which a synchronisation is sent again. It doubles.
const SYNC_AGAIN: Duration = Duration::from_secs(2);

/// Bytes that are read at a time.
const CHUNK: usize = 8 << 10;

/// Longest time limit that is honoured.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// A connection to the agent of one guest.
///
/// Commands have no `id`: agents before QEMU 3.0 refuse it. Instead the stream is brought into step by
/// `guest-sync-delimited`: at the beginning, and after each command that timed out, was abandoned by its caller or had
/// an invalid reply. What the guest sends before the reply to that is skipped.
///
/// Every method takes the longest time that it may take, synchronisation included; [`limit`] has values that fit.
pub struct GuestAgent<S> {
    stream: S,
    chunk: Box<[u8]>,
    /// The part of `chunk` that has arrived and was not used.
    unread: Range<usize>,
    decoder: LineDecoder,
    /// No reply is outstanding.
    is_synchronized: bool,
    closed: bool,
}

/// Without what the guest sent.
impl<S> fmt::Debug for GuestAgent<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("GuestAgent")
            .field("is_synchronized", &self.is_synchronized)
            .field("closed", &self.closed)
            .finish_non_exhaustive()
    }
}

#[derive(Serialize)]
struct Request<A> {
    execute: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<A>,
}

/// A command that is about to be sent.
#[derive(Debug, Clone, Copy)]
struct Call {
    name: &'static str,
    limit: Duration,
    deadline: Instant,
    max_reply: usize,
}

impl Call {
    fn new(name: &'static str, limit: Duration) -> Call {
        Call {
            name,
            limit,
            deadline: Instant::now() + limit.min(LONGEST),
            max_reply: MAX_REPLY,
        }
    }

    fn timeout(&self) -> AgentError {
        AgentError::Timeout {
            command: self.name,
            limit: self.limit,
        }
    }

    fn fault(&self, fault: Fault) -> AgentError {
        AgentError::Protocol {
            command: self.name,
            fault,
        }
    }
}

/// For a command without arguments.
const NOTHING: Option<()> = None;

impl<S: AsyncRead + AsyncWrite + Unpin> GuestAgent<S> {
    /// Sends nothing yet.
    pub fn new(stream: S) -> GuestAgent<S> {
        GuestAgent {
            stream,
            chunk: vec![0; CHUNK].into_boxed_slice(),
            unread: 0..0,
            decoder: LineDecoder::default(),
            is_synchronized: false,
            closed: false,
        }
    }

    /// True once the stream has ended: the client is of no more use.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Brings the stream into step if it is not: `guest-sync-delimited`.
    ///
    /// # Errors
    /// [`AgentError::Unresponsive`], [`AgentError::Disconnected`]; the guest sends without end and no reply is among
    /// it.
    pub async fn sync(&mut self, limit: Duration) -> Result<(), AgentError> {
        self.sync_for(Call::new("guest-sync-delimited", limit)).await
    }

    async fn sync_for(&mut self, call: Call) -> Result<(), AgentError> {
        // What comes unasked is no reply to what is sent next.
        if self.is_synchronized && self.chunk[self.unread.clone()].trim_ascii().is_empty() {
            return Ok(());
        }
        self.is_synchronized = false;
        let synced = timeout_at(call.deadline, self.synchronise(call)).await;
        let unresponsive = |_| AgentError::Unresponsive {
            command: call.name,
            limit: call.limit,
        };
        self.note_end(synced.map_err(unresponsive).flatten())?;
        self.is_synchronized = true;
        Ok(())
    }

    /// The guest may lose a request that arrives while no agent has the port open, so this repeats the request. Only the
    /// last id counts: the agent answers in order, so no reply to an earlier one can follow.
    async fn synchronise(&mut self, call: Call) -> Result<(), AgentError> {
        #[derive(Serialize)]
        struct Sync {
            id: u64,
        }
        self.decoder.begin(Mode::Hunting, MAX_SYNC_REPLY, MAX_SKIPPED);
        let mut wait = SYNC_AGAIN;
        loop {
            // An integer that every JSON parser keeps exactly.
            let id = Uuid::new_v4().as_u64_pair().0 >> 11;
            // The agent answers the sentinel with an error, and begins a new value.
            let mut line = vec![SENTINEL];
            line.extend(encode(&Request {
                execute: "guest-sync-delimited",
                arguments: Some(Sync { id }),
            }));
            self.send(&line).await?;
            if let Ok(found) = timeout(wait, self.find_sync(call, id)).await {
                return found;
            }
            wait *= 2;
        }
    }

    /// Reads up to the reply to the synchronisation `id`.
    async fn find_sync(&mut self, call: Call, id: u64) -> Result<(), AgentError> {
        for _ in 0..MAX_STALE_REPLIES {
            let line = self.read_line(call).await?;
            if reply::parse::<u64>(call.name, &line).is_ok_and(|answered| answered == id) {
                return Ok(());
            }
            // The reply to an earlier synchronisation, or garbage: the next sentinel may be followed by ours.
            self.decoder.resync();
        }
        Err(call.fault(Fault::StaleReplies(MAX_STALE_REPLIES)))
    }

    /// Sends a command and waits for its reply.
    async fn call<A: Serialize, T: DeserializeOwned>(
        &mut self,
        call: Call,
        arguments: Option<A>,
    ) -> Result<T, AgentError> {
        self.sync_for(call).await?;
        let line = encode(&Request {
            execute: call.name,
            arguments,
        });
        // Until the reply is here, also if the caller drops this future.
        self.is_synchronized = false;
        let exchanged = timeout_at(call.deadline, self.exchange(call, &line)).await;
        let reply = self.note_end(exchanged.map_err(|_| call.timeout()).flatten())?;
        let parsed = reply::parse(call.name, &reply);
        self.is_synchronized = !matches!(parsed, Err(AgentError::Protocol { .. }));
        parsed
    }

    async fn exchange(&mut self, call: Call, line: &[u8]) -> Result<Vec<u8>, AgentError> {
        self.send(line).await?;
        let budget = call.max_reply + MAX_NOISE;
        self.decoder.begin(Mode::Synchronized, call.max_reply, budget);
        self.read_line(call).await
    }

    async fn send(&mut self, line: &[u8]) -> Result<(), AgentError> {
        if self.closed {
            return Err(AgentError::Disconnected(None));
        }
        let sent = async {
            self.stream.write_all(line).await?;
            self.stream.flush().await
        };
        sent.await.map_err(|error| AgentError::Disconnected(Some(error)))
    }

    async fn read_line(&mut self, call: Call) -> Result<Vec<u8>, AgentError> {
        loop {
            let mut input = &self.chunk[self.unread.clone()];
            let taken = self.decoder.take(&mut input);
            self.unread.start = self.unread.end - input.len();
            if let Some(line) = taken.map_err(|fault| call.fault(fault))? {
                return Ok(line);
            }
            let read = self.stream.read(&mut self.chunk).await;
            let count = read.map_err(|error| AgentError::Disconnected(Some(error)))?;
            if count == 0 {
                return Err(AgentError::Disconnected(None));
            }
            self.unread = 0..count;
        }
    }

    /// Remembers that the stream has ended.
    fn note_end<T>(&mut self, result: Result<T, AgentError>) -> Result<T, AgentError> {
        self.closed |= matches!(result, Err(AgentError::Disconnected(_)));
        result
    }
}

/// One line. Commands consist of strings and numbers, which can always be written.
fn encode<A: Serialize>(request: &Request<A>) -> Vec<u8> {
    let mut line = serde_json::to_vec(request).expect("a command is JSON");
    line.push(b'\n');
    line
}
