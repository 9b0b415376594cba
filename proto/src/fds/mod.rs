//! The descriptor channel, which carries file descriptors to a confined process.
//!
//! gRPC cannot carry descriptors: a second socketpair does. The receiver opens no files. A request names each of its
//! descriptors by a [`Token`], with which the descriptor was sent before.
//!
//! # Wire format
//!
//! A `SOCK_SEQPACKET` Unix socketpair, one direction. A message is
//!
//! - payload: `n` tokens of 16 bytes each, 1 ≤ n ≤ 253 ([`MAX_FDS_PER_MESSAGE`], the kernel's
//!   `SCM_MAX_FD`), nothing else;
//! - one `SCM_RIGHTS` control message with exactly `n` descriptors, in the order of the tokens.
//!
//! There is no answer: a request with a token fails if the descriptor has not arrived. An empty message ends the
//! channel. A listening socket takes the same messages from the connections that it admits ([`FdReceiver::listen`]).
//!
//! # Limits
//!
//! The receiver refuses a message that is truncated, has unequal numbers of tokens and descriptors or repeats a token,
//! and closes its descriptors. At most [`MAX_OUTSTANDING`] descriptors wait to be taken, each for at most
//! [`UNCLAIMED_TIMEOUT`]; a request waits at most [`TAKE_TIMEOUT`]. Every descriptor arrives close-on-exec.

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

/// Maximum number of descriptors in one message.
pub const MAX_FDS_PER_MESSAGE: usize = 253;
/// Maximum number of descriptors that wait to be taken. A message that would exceed it is refused as a whole.
pub const MAX_OUTSTANDING: usize = 4096;
/// Maximum time [`FdReceiver::take`] waits for a descriptor.
pub const TAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which a descriptor that is not taken is closed.
pub const UNCLAIMED_TIMEOUT: Duration = Duration::from_secs(30);

/// The name of one descriptor on the channel: 128 random bits, used once.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token([u8; Token::LEN]);

impl Token {
    /// Length of a token in bytes.
    pub const LEN: usize = 16;

    /// Creates a random token.
    #[must_use]
    pub fn random() -> Token {
        Token(uuid::Uuid::new_v4().into_bytes())
    }

    /// The bytes of the token on the wire.
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

/// A token in a request is not [`Token::LEN`] bytes long.
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

/// Creates a channel. Returns the sender's end, then the receiver's, both close-on-exec.
pub fn socketpair() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Makes a socket nonblocking and registers it with the current tokio runtime.
fn register(socket: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&socket, true)?;
    // SAFETY: an OwnedFd is open, always names the same descriptor, and is closed only when it is dropped. The AsyncFd
    // owns it from here on, and this module never takes it out or replaces it.
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
