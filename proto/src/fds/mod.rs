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
mod socket;
mod token;

use std::io;
use std::os::fd::OwnedFd;

pub use receiver::{FdReceiver, TakeError};
pub use sender::{FdSender, SendError};
pub use socket::{MAX_FDS_PER_MESSAGE, MAX_OUTSTANDING, TAKE_TIMEOUT, UNCLAIMED_TIMEOUT};
pub use token::{BadToken, Token};

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
