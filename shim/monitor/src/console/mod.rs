//! The guest's serial console. It is always drained, so the guest never waits for a reader.
//!
//! One actor owns the socket of ttyS0. Output goes to a log of bounded size, to a scrollback for the next session, to
//! at most one session, and to at most one mirror: the standard streams of a container. A session or mirror that is too
//! slow misses output and is told how much. A guest that does not read blocks only their input.

mod listener;
mod log;
mod scrollback;

use std::path::PathBuf;

use husk_proto::shim::v1::ConsoleOutput;
use husk_proto::shim::v1::console_output::Ended;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tracing::debug;

use listener::{Listener, room};
use log::Log;
use scrollback::Scrollback;

/// Bytes read from the guest at a time.
const CHUNK: usize = 4096;
/// Maximum bytes a session may lag behind. Further output is skipped.
const SESSION_BYTES: usize = 256 << 10;
/// The same for a mirror, which is a container's log.
const MIRROR_BYTES: usize = 2 << 20;
/// Maximum bytes that wait for the guest to read them. Further input waits in the session.
const INPUT_BYTES: usize = 64 << 10;

/// A handle to the actor of a console. The actor ends with its last handle.
#[derive(Debug, Clone)]
pub struct Console {
    attach: mpsc::Sender<Attach>,
    input: mpsc::Sender<Input>,
}

#[derive(Debug)]
struct Attach {
    as_mirror: bool,
    output: mpsc::Sender<ConsoleOutput>,
    /// Returns the session's number, which its input carries.
    id: tokio::sync::oneshot::Sender<u64>,
}

#[derive(Debug)]
struct Input {
    session: u64,
    data: Vec<u8>,
}

/// One session's two directions.
#[derive(Debug)]
pub struct Session {
    /// The output, the scrollback first. The last message holds the reason for the end of the session.
    pub output: mpsc::Receiver<ConsoleOutput>,
    /// The input.
    pub input: SessionInput,
}

/// The input of a session.
#[derive(Debug)]
pub struct SessionInput {
    id: u64,
    input: mpsc::Sender<Input>,
}

impl SessionInput {
    /// Sends `data` to the guest. Waits while the guest does not read. Drops `data` if another session has taken over.
    /// Fails only if the VM has ended.
    pub async fn send(&self, data: Vec<u8>) -> Result<(), VmEnded> {
        self.input
            .send(Input {
                session: self.id,
                data,
            })
            .await
            .map_err(|_| VmEnded)
    }
}

/// The VM of the console has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the VM has ended")]
pub struct VmEnded;

impl Console {
    /// Starts the actor on the guest's console socket. `log` is the path of the log.
    pub fn start(guest: UnixStream, log: PathBuf) -> Console {
        let (attach, attaches) = mpsc::channel(4);
        let (input, inputs) = mpsc::channel(4);
        let (reader, writer) = guest.into_split();
        let actor = Actor {
            guest: Some(reader),
            writer,
            attaches,
            inputs,
            pending: Vec::new(),
            session: None,
            mirror: None,
            sessions: 0,
            scrollback: Scrollback::default(),
            log: Log::new(log),
        };
        tokio::spawn(actor.run());
        Console { attach, input }
    }

    /// Opens a session. The session open before ends.
    pub async fn attach(&self) -> Result<Session, VmEnded> {
        self.listen(false).await
    }

    /// Opens the mirror, which is independent of sessions. The mirror open before ends.
    pub async fn mirror(&self) -> Result<Session, VmEnded> {
        self.listen(true).await
    }

    async fn listen(&self, as_mirror: bool) -> Result<Session, VmEnded> {
        let (output, receiver) = listener::channel();
        let (id, answer) = tokio::sync::oneshot::channel();
        self.attach
            .send(Attach {
                as_mirror,
                output,
                id,
            })
            .await
            .map_err(|_| VmEnded)?;
        let id = answer.await.map_err(|_| VmEnded)?;
        Ok(Session {
            output: receiver,
            input: SessionInput {
                id,
                input: self.input.clone(),
            },
        })
    }
}

struct Actor {
    /// `None` once the guest's end of the socket has closed.
    guest: Option<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    attaches: mpsc::Receiver<Attach>,
    inputs: mpsc::Receiver<Input>,
    /// Input that the guest has not read.
    pending: Vec<u8>,
    session: Option<Listener>,
    mirror: Option<Listener>,
    sessions: u64,
    scrollback: Scrollback,
    log: Log,
}

impl Actor {
    async fn run(mut self) {
        let mut chunk = [0; CHUNK];
        loop {
            tokio::select! {
                read = read(&mut self.guest, &mut chunk) => match read {
                    Some(length) => self.on_output(&chunk[..length]),
                    None => self.on_hangup(),
                },
                attach = self.attaches.recv() => match attach {
                    Some(attach) => self.attached(attach),
                    None => return,
                },
                Some(input) = self.inputs.recv(), if self.pending.len() < INPUT_BYTES => self.on_input(input),
                written = self.writer.write(&self.pending), if !self.pending.is_empty() => match written {
                    Ok(length @ 1..) => drop(self.pending.drain(..length)),
                    _ => self.pending.clear(),
                },
                here = room(self.session.as_ref()) => catch_up(&mut self.session, here),
                here = room(self.mirror.as_ref()) => catch_up(&mut self.mirror, here),
            }
        }
    }

    fn on_output(&mut self, data: &[u8]) {
        self.log.append(data);
        self.scrollback.append(data);
        for listener in [&mut self.session, &mut self.mirror] {
            if listener.as_mut().is_some_and(|listener| !listener.send(data)) {
                *listener = None;
            }
        }
    }

    fn on_hangup(&mut self) {
        debug!("the guest's console closed");
        self.guest = None;
        for listener in [self.session.take(), self.mirror.take()].into_iter().flatten() {
            listener.end(Ended::VmEnded);
        }
    }

    fn attached(&mut self, attach: Attach) {
        self.sessions += 1;
        let limit = match attach.as_mirror {
            true => MIRROR_BYTES,
            false => SESSION_BYTES,
        };
        let mut listener = Listener::new(self.sessions, attach.output, limit);
        if attach.id.send(self.sessions).is_err() {
            return;
        }
        let place = match attach.as_mirror {
            true => &mut self.mirror,
            false => &mut self.session,
        };
        if let Some(older) = place.take() {
            older.end(Ended::TakenOver);
        }
        let earlier = self.scrollback.content();
        if !earlier.is_empty() {
            listener.send(&earlier);
        }
        if self.guest.is_some() {
            *place = Some(listener);
        } else {
            listener.end(Ended::VmEnded);
        }
    }

    fn on_input(&mut self, input: Input) {
        let mut listeners = [&self.session, &self.mirror].into_iter().flatten();
        if self.guest.is_some() && listeners.any(|listener| listener.id == input.session) {
            self.pending.extend(input.data);
        }
    }
}

/// Sends a part of what waits for a listener, unless its reader is gone.
fn catch_up(place: &mut Option<Listener>, here: bool) {
    match place {
        Some(listener) if here => listener.catch_up(),
        _ => *place = None,
    }
}

/// Reads the next bytes. Returns `None` when the other end has closed, and never completes after that.
async fn read(guest: &mut Option<OwnedReadHalf>, chunk: &mut [u8]) -> Option<usize> {
    match guest {
        Some(guest) => guest.read(chunk).await.ok().filter(|length| *length > 0),
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
