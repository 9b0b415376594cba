//! The guest's serial console: always drained, so that the guest never waits for whoever looks on.
//!
//! One actor owns the socket that ttyS0 is connected to. What the guest says goes to a log of bounded size, to a
//! scrollback for the next session, to the one session there may be, and to the one mirror: the standard streams of a
//! container. A session or mirror that does not keep up misses output and is told how much; a guest that does not read
//! stops their input, nothing else.

mod log;
mod scrollback;

use std::path::PathBuf;

use husk_proto::shim::v1::ConsoleOutput;
use husk_proto::shim::v1::console_output::{Ended, Output};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tracing::debug;

use log::Log;
use scrollback::Scrollback;

/// Bytes read from the guest at a time.
const CHUNK: usize = 4096;
/// Chunks a session may lag behind; beyond it output is skipped.
const SESSION_CHUNKS: usize = 64;
/// The same for a mirror, which is someone's log.
const MIRROR_CHUNKS: usize = 512;
/// Bytes waiting for the guest to read them; beyond it the session's input waits.
const INPUT_BYTES: usize = 64 << 10;

/// A handle on a console's actor, which ends with its last handle.
#[derive(Debug, Clone)]
pub struct Console {
    attach: mpsc::Sender<Attach>,
    input: mpsc::Sender<Input>,
}

#[derive(Debug)]
struct Attach {
    as_mirror: bool,
    output: mpsc::Sender<ConsoleOutput>,
    /// Told to the session, which stamps its input with it.
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
    /// What the guest says, the scrollback first; the last message says why the session ended.
    pub output: mpsc::Receiver<ConsoleOutput>,
    /// What is typed.
    pub input: SessionInput,
}

/// The way to the guest.
#[derive(Debug)]
pub struct SessionInput {
    id: u64,
    input: mpsc::Sender<Input>,
}

impl SessionInput {
    /// Gives `data` to the guest; waits while the guest does not read. Once the session was taken over it is dropped.
    /// Nothing but the error that the VM has ended.
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

/// The console is gone with its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the VM has ended")]
pub struct VmEnded;

impl Console {
    /// Starts the actor on the guest's console socket; `log` is the path of the current log.
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

    /// Opens a session; one that is open already ends.
    pub async fn attach(&self) -> Result<Session, VmEnded> {
        self.listen(SESSION_CHUNKS, false).await
    }

    /// Opens the mirror, which stays while sessions come and go; one that is open already ends.
    pub async fn mirror(&self) -> Result<Session, VmEnded> {
        self.listen(MIRROR_CHUNKS, true).await
    }

    async fn listen(&self, chunks: usize, as_mirror: bool) -> Result<Session, VmEnded> {
        // One slot is kept for the last message, one for the scrollback, one for a note on what was skipped.
        let (output, receiver) = mpsc::channel(chunks + 3);
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
    /// Until the guest's end of the socket closes.
    guest: Option<OwnedReadHalf>,
    writer: OwnedWriteHalf,
    attaches: mpsc::Receiver<Attach>,
    inputs: mpsc::Receiver<Input>,
    /// Typed, not yet read by the guest.
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
                    Some(length) => self.said(&chunk[..length]),
                    None => self.hung_up(),
                },
                attach = self.attaches.recv() => match attach {
                    Some(attach) => self.attached(attach),
                    None => return,
                },
                Some(input) = self.inputs.recv(), if self.pending.len() < INPUT_BYTES => self.typed(input),
                written = self.writer.write(&self.pending), if !self.pending.is_empty() => match written {
                    Ok(length @ 1..) => drop(self.pending.drain(..length)),
                    _ => self.pending.clear(),
                },
            }
        }
    }

    fn said(&mut self, data: &[u8]) {
        self.log.append(data);
        self.scrollback.append(data);
        for listener in [&mut self.session, &mut self.mirror] {
            if listener.as_mut().is_some_and(|listener| !listener.send(data)) {
                *listener = None;
            }
        }
    }

    fn hung_up(&mut self) {
        debug!("the guest's console closed");
        self.guest = None;
        for listener in [self.session.take(), self.mirror.take()].into_iter().flatten() {
            listener.end(Ended::VmEnded);
        }
    }

    fn attached(&mut self, attach: Attach) {
        self.sessions += 1;
        let mut listener = Listener {
            id: self.sessions,
            output: attach.output,
            skipped: 0,
        };
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
        let said = self.scrollback.content();
        if !said.is_empty() {
            listener.send(&said);
        }
        if self.guest.is_some() {
            *place = Some(listener);
        } else {
            listener.end(Ended::VmEnded);
        }
    }

    fn typed(&mut self, input: Input) {
        let mut listeners = [&self.session, &self.mirror].into_iter().flatten();
        if self.guest.is_some() && listeners.any(|listener| listener.id == input.session) {
            self.pending.extend(input.data);
        }
    }
}

/// The next bytes; nothing once the other end has closed; forever waiting after that.
async fn read(guest: &mut Option<OwnedReadHalf>, chunk: &mut [u8]) -> Option<usize> {
    match guest {
        Some(guest) => guest.read(chunk).await.ok().filter(|length| *length > 0),
        None => std::future::pending().await,
    }
}

/// The actor's side of the session.
#[derive(Debug)]
struct Listener {
    id: u64,
    output: mpsc::Sender<ConsoleOutput>,
    skipped: u64,
}

impl Listener {
    /// False where the session has gone.
    fn send(&mut self, data: &[u8]) -> bool {
        // This is the only sender, so what is free stays free: one slot for the note, one for the data, one for the end.
        if self.output.capacity() < 3 {
            self.skipped = self.skipped.saturating_add(data.len() as u64);
            return !self.output.is_closed();
        }
        if self.skipped > 0 {
            let skipped = std::mem::take(&mut self.skipped);
            let _ = self.output.try_send(ConsoleOutput {
                output: Some(Output::SkippedBytes(skipped)),
            });
        }
        self.output
            .try_send(ConsoleOutput {
                output: Some(Output::Data(data.to_vec())),
            })
            .is_ok()
    }

    fn end(self, why: Ended) {
        let _ = self.output.try_send(ConsoleOutput {
            output: Some(Output::Ended(why.into())),
        });
    }
}

#[cfg(test)]
mod tests;
