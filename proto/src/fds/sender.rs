//! The sending end of a descriptor channel.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType, connect, sendmsg, socket_with,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::socket::{MAX_FDS_PER_MESSAGE, register};
use super::token::Token;

/// Errors of sending descriptors.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The number of descriptors is not in 1 to [`MAX_FDS_PER_MESSAGE`].
    #[error("{0} descriptors do not fit one message of 1 to {MAX_FDS_PER_MESSAGE}")]
    Count(usize),
    /// The receiving process has closed the channel.
    #[error("the receiver has closed the descriptor channel")]
    Closed,
    /// Any other error.
    #[error("sending descriptors failed")]
    Io(#[from] io::Error),
}

/// The sending end of a descriptor channel.
#[derive(Debug)]
pub struct FdSender {
    socket: AsyncFd<OwnedFd>,
}

impl FdSender {
    /// Takes ownership of the sending end of [`super::socketpair`]. Requires a tokio runtime with I/O enabled.
    pub fn new(socket: OwnedFd) -> io::Result<FdSender> {
        Ok(FdSender {
            socket: register(socket, Interest::WRITABLE)?,
        })
    }

    /// Connects to the listening socket at `path`. Requires a tokio runtime with I/O enabled.
    pub fn connect(path: &Path) -> io::Result<FdSender> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        FdSender::new(socket)
    }

    /// Sends all of `fds` in one message. The caller keeps its own copies. Returns when the kernel has the message: a
    /// request with the tokens may follow at once.
    pub async fn send(&self, fds: &[(Token, BorrowedFd<'_>)]) -> Result<(), SendError> {
        if fds.is_empty() || fds.len() > MAX_FDS_PER_MESSAGE {
            return Err(SendError::Count(fds.len()));
        }
        let payload: Vec<u8> = fds.iter().flat_map(|(token, _)| *token.as_bytes()).collect();
        let rights: Vec<BorrowedFd<'_>> = fds.iter().map(|(_, fd)| *fd).collect();
        let sent = self
            .socket
            .async_io(Interest::WRITABLE, |socket| {
                send_message(socket, &payload, &rights)
            })
            .await;
        match sent {
            Ok(()) => Ok(()),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                ) =>
            {
                Err(SendError::Closed)
            }
            Err(e) => Err(SendError::Io(e)),
        }
    }

    /// Sends one descriptor with a new token.
    pub async fn send_one(&self, fd: BorrowedFd<'_>) -> Result<Token, SendError> {
        let token = Token::random();
        self.send(&[(token, fd)]).await?;
        Ok(token)
    }
}

/// Sends one message with `payload` and `fds`. Does not block.
pub(super) fn send_message(socket: &OwnedFd, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS_PER_MESSAGE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(
        socket,
        &[IoSlice::new(payload)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}
