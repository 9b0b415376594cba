//! The descriptor channel: file descriptors on their way to a confined process.
//!
//! gRPC cannot carry descriptors, so a second socketpair does. The receiver opens nothing itself; a request
//! names each descriptor it is about by a [`Token`], and the descriptor has been sent under that token before.
//!
//! # Wire format
//!
//! A `SOCK_SEQPACKET` Unix socketpair, one direction. A message is
//!
//! - payload: `n` tokens of 16 bytes each, 1 ≤ n ≤ 253 ([`MAX_FDS_PER_MESSAGE`], the kernel's `SCM_MAX_FD`), nothing else;
//! - one `SCM_RIGHTS` control message with exactly `n` descriptors, in the order of the tokens.
//!
//! There is no answer: the request that quotes a token fails where its descriptor did not arrive. An empty
//! message means the same as the end of the channel. A listening socket takes the same messages from whoever connects
//! and is let in ([`FdReceiver::listen`]).
//!
//! # What the receiver holds against its peer
//!
//! Descriptors of a message that is truncated, counts differently in its two halves or repeats a token are
//! closed at once; none of that message is taken. At most [`MAX_OUTSTANDING`] descriptors wait to be taken, each
//! for at most [`UNCLAIMED_TIMEOUT`]; a request waits at most [`TAKE_TIMEOUT`]. Every descriptor arrives close-on-exec.

mod listener;
mod receiver;
mod sender;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

pub use receiver::{FdReceiver, TakeError};
pub use sender::{FdSender, SendError};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::vmm::v1::Fd;

/// The most descriptors one message carries.
pub const MAX_FDS_PER_MESSAGE: usize = 253;
/// The most descriptors that may wait to be taken; a message that would pass it is refused whole.
pub const MAX_OUTSTANDING: usize = 4096;
/// How long [`FdReceiver::take`] waits for a descriptor that has not arrived yet.
pub const TAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a descriptor nobody takes is kept open.
pub const UNCLAIMED_TIMEOUT: Duration = Duration::from_secs(30);

/// The name of one descriptor on the channel: 128 random bits, used once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token([u8; Token::LEN]);

impl Token {
    /// Bytes of a token on the wire and in a request.
    pub const LEN: usize = 16;

    /// A fresh token.
    #[must_use]
    pub fn random() -> Token {
        Token(uuid::Uuid::new_v4().into_bytes())
    }

    /// The token as it stands on the wire.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Token::LEN] {
        &self.0
    }
}

impl From<[u8; Token::LEN]> for Token {
    fn from(bytes: [u8; Token::LEN]) -> Token {
        Token(bytes)
    }
}

impl From<Token> for Fd {
    fn from(token: Token) -> Fd {
        Fd {
            token: token.0.to_vec(),
        }
    }
}

/// A request quoted a token that is not [`Token::LEN`] bytes long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a descriptor token has 16 bytes, not {0}")]
pub struct BadToken(pub usize);

impl TryFrom<&Fd> for Token {
    type Error = BadToken;

    fn try_from(fd: &Fd) -> Result<Token, BadToken> {
        fd.token
            .as_slice()
            .try_into()
            .map(Token)
            .map_err(|_| BadToken(fd.token.len()))
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({self})")
    }
}

/// The two ends of a fresh channel, close-on-exec: the sender's, then the receiver's.
pub fn socketpair() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Puts a nonblocking socket under the current tokio runtime.
fn register(socket: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&socket, true)?;
    // SAFETY: an OwnedFd is open, always names the same descriptor and is closed only when dropped; the AsyncFd
    // owns it from here, and this module never takes it out or replaces it.
    Ok(unsafe { AsyncFd::register_with_interest(socket, interest) }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_the_request_and_a_short_one_is_refused() {
        let token = Token::random();
        assert_eq!(Token::try_from(&Fd::from(token)), Ok(token));
        assert_ne!(token, Token::random());
        assert_eq!(Token::try_from(&Fd { token: vec![1; 15] }), Err(BadToken(15)));
        assert_eq!(Token::from([0xab; 16]).to_string(), "ab".repeat(16));
    }
}
