//! The receiving end of a descriptor channel.

use std::collections::{HashMap, HashSet};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketType, recvmsg,
    sockopt::socket_type,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, warn};

use super::socket::{MAX_FDS_PER_MESSAGE, MAX_OUTSTANDING, TAKE_TIMEOUT, UNCLAIMED_TIMEOUT, register};
use super::token::Token;

/// Errors of taking a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TakeError {
    /// No descriptor arrived with the token within [`TAKE_TIMEOUT`], or it was taken before.
    #[error("no descriptor arrived with token {0}")]
    Missing(Token),
    /// The channel is closed, and the descriptor has not arrived.
    #[error("the descriptor channel is closed and token {0} never arrived")]
    Closed(Token),
    /// Another request waits for this token.
    #[error("another request waits for token {0} already")]
    Awaited(Token),
    /// The maximum number of requests wait.
    #[error("too many requests wait for descriptors")]
    Busy,
}

/// The receiving end: a cloneable handle of the actor that owns the socket. When the last handle is dropped, the actor
/// ends and closes the descriptors that it still holds.
#[derive(Debug, Clone)]
pub struct FdReceiver {
    mailbox: mpsc::Sender<TakeRequest>,
}

#[derive(Debug)]
struct TakeRequest {
    token: Token,
    reply: oneshot::Sender<Result<OwnedFd, TakeError>>,
}

impl FdReceiver {
    /// Takes ownership of the receiving end of a channel and spawns its actor on the current tokio runtime.
    ///
    /// # Errors
    /// `socket` is not a `SOCK_SEQPACKET` socket.
    pub fn new(socket: OwnedFd) -> io::Result<FdReceiver> {
        if socket_type(&socket)? != SocketType::SEQPACKET {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the descriptor channel is not SOCK_SEQPACKET",
            ));
        }
        let socket = register(socket, Interest::READABLE)?;
        Ok(FdReceiver::from_source(
            MessageSource::Channel(socket),
            MAX_OUTSTANDING,
        ))
    }

    /// Spawns the actor for `source`. At most `limit` descriptors wait to be taken.
    pub(super) fn from_source(source: MessageSource, limit: usize) -> FdReceiver {
        let (mailbox, requests) = mpsc::channel(64);
        tokio::spawn(
            FdReceiverActor {
                source,
                requests,
                table: FdTable::new(limit),
            }
            .run(),
        );
        FdReceiver { mailbox }
    }

    /// Takes the descriptor that was sent with `token`, and waits up to [`TAKE_TIMEOUT`] for it. A descriptor can be
    /// taken once.
    pub async fn take(&self, token: Token) -> Result<OwnedFd, TakeError> {
        let (reply, answer) = oneshot::channel();
        self.mailbox
            .send(TakeRequest { token, reply })
            .await
            .map_err(|_| TakeError::Closed(token))?;
        answer.await.map_err(|_| TakeError::Closed(token))?
    }
}

/// The source of messages.
pub(super) enum MessageSource {
    /// The socket of the only sender.
    Channel(AsyncFd<OwnedFd>),
    /// Messages of several connections.
    Many(mpsc::Receiver<FdMessage>),
}

impl MessageSource {
    /// Returns the next message, or `None` at the end.
    async fn next(&mut self) -> io::Result<Option<FdMessage>> {
        match self {
            MessageSource::Channel(socket) => socket.async_io(Interest::READABLE, receive).await,
            MessageSource::Many(messages) => Ok(messages.recv().await),
        }
    }
}

struct FdReceiverActor {
    source: MessageSource,
    requests: mpsc::Receiver<TakeRequest>,
    table: FdTable,
}

impl FdReceiverActor {
    async fn run(mut self) {
        loop {
            let deadline = self.table.next_deadline();
            tokio::select! {
                message = self.source.next(), if !self.table.closed => self.received(message),
                request = self.requests.recv() => match request {
                    Some(request) => self.table.take(request, Instant::now()),
                    None => return,
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.table.expire(Instant::now());
                }
            }
        }
    }

    fn received(&mut self, message: io::Result<Option<FdMessage>>) {
        match message {
            Ok(Some(message)) => {
                if let Err(reason) = self.table.arrived(message, Instant::now()) {
                    warn!(reason, "descriptors refused");
                }
            }
            Ok(None) => self.table.close(),
            Err(error) => {
                warn!(%error, "descriptor channel failed");
                self.table.close();
            }
        }
    }
}

/// A received message. Dropping it closes its descriptors.
#[derive(Debug)]
pub(super) struct FdMessage {
    tokens: Vec<u8>,
    fds: Vec<OwnedFd>,
    truncated: bool,
}

/// Receives the next message, or `None` at the end of the channel. Does not block.
pub(super) fn receive(socket: &OwnedFd) -> io::Result<Option<FdMessage>> {
    let mut payload = vec![0; MAX_FDS_PER_MESSAGE * Token::LEN];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS_PER_MESSAGE))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut payload)], &mut control, flags)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.bytes == 0 && fds.is_empty() {
        return Ok(None);
    }
    payload.truncate(got.bytes);
    let truncated = got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok(Some(FdMessage {
        tokens: payload,
        fds,
        truncated,
    }))
}

/// Descriptors that have arrived, and requests that wait. A token is in at most one of the two.
#[derive(Debug)]
struct FdTable {
    /// Maximum number of entries of either kind.
    limit: usize,
    held: HashMap<Token, (OwnedFd, Instant)>,
    awaited: HashMap<Token, (TakeRequest, Instant)>,
    closed: bool,
}

impl FdTable {
    fn new(limit: usize) -> FdTable {
        FdTable {
            limit,
            held: HashMap::new(),
            awaited: HashMap::new(),
            closed: false,
        }
    }

    /// Takes all descriptors of a message, or none.
    fn arrived(&mut self, message: FdMessage, now: Instant) -> Result<(), &'static str> {
        if message.truncated {
            return Err("message truncated, or this process is out of descriptors");
        }
        let (tokens, rest) = message.tokens.as_chunks::<{ Token::LEN }>();
        if !rest.is_empty() || tokens.len() != message.fds.len() {
            return Err("tokens and descriptors differ in number");
        }
        if self.held.len() + tokens.len() > self.limit {
            return Err("too many unclaimed descriptors");
        }
        let mut seen = HashSet::with_capacity(tokens.len());
        if tokens
            .iter()
            .any(|bytes| !seen.insert(bytes) || self.held.contains_key(&Token::from(*bytes)))
        {
            return Err("token used twice");
        }
        for (bytes, fd) in tokens.iter().zip(message.fds) {
            self.hand_over(Token::from(*bytes), fd, now);
        }
        Ok(())
    }

    fn hand_over(&mut self, token: Token, fd: OwnedFd, now: Instant) {
        let unclaimed = match self.awaited.remove(&token) {
            // The descriptor of a cancelled request stays for the next one.
            Some((take, _)) => take.reply.send(Ok(fd)).err().and_then(Result::ok),
            None => Some(fd),
        };
        if let Some(fd) = unclaimed {
            self.held.insert(token, (fd, now + UNCLAIMED_TIMEOUT));
        }
    }

    fn take(&mut self, take: TakeRequest, now: Instant) {
        let token = take.token;
        let refusal = if let Some((fd, deadline)) = self.held.remove(&token) {
            if let Err(Ok(fd)) = take.reply.send(Ok(fd)) {
                self.held.insert(token, (fd, deadline));
            }
            return;
        } else if self.closed {
            TakeError::Closed(token)
        } else if self
            .awaited
            .get(&token)
            .is_some_and(|(other, _)| !other.reply.is_closed())
        {
            TakeError::Awaited(token)
        } else if self.awaited.len() >= self.limit {
            TakeError::Busy
        } else {
            self.awaited.insert(token, (take, now + TAKE_TIMEOUT));
            return;
        };
        let _ = take.reply.send(Err(refusal));
    }

    fn next_deadline(&self) -> Option<Instant> {
        let held = self.held.values().map(|(_, deadline)| *deadline);
        held.chain(self.awaited.values().map(|(_, deadline)| *deadline))
            .min()
    }

    fn expire(&mut self, now: Instant) {
        for (token, _) in self.held.extract_if(|_, (_, deadline)| *deadline <= now) {
            warn!(%token, "unclaimed descriptor closed");
        }
        for (token, (take, _)) in self.awaited.extract_if(|_, (_, deadline)| *deadline <= now) {
            let _ = take.reply.send(Err(TakeError::Missing(token)));
        }
    }

    fn close(&mut self) {
        debug!("descriptor channel closed");
        self.closed = true;
        for (token, (take, _)) in self.awaited.drain() {
            let _ = take.reply.send(Err(TakeError::Closed(token)));
        }
    }
}

#[cfg(test)]
mod tests;
