//! Limits of a channel, and its sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Maximum number of descriptors in one message.
pub const MAX_FDS_PER_MESSAGE: usize = 253;
/// Maximum number of descriptors that wait to be taken. A message that would exceed it is refused as a whole. All of a
/// VM wait at once: up to 4,096 SCSI disks have two each, and NICs in 31 slots have 127 queue pairs of two each.
pub const MAX_OUTSTANDING: usize = 24 << 10;
/// Maximum time [`FdReceiver::take`] waits for a descriptor.
pub const TAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which a descriptor that is not taken is closed.
pub const UNCLAIMED_TIMEOUT: Duration = Duration::from_secs(30);

/// Makes a socket nonblocking and registers it with the current tokio runtime.
pub(super) fn register(socket: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&socket, true)?;
    // SAFETY: an OwnedFd is open, always names the same descriptor, and is closed only when it is dropped. The AsyncFd
    // owns it from here on, and this module never takes it out or replaces it.
    Ok(unsafe { AsyncFd::register_with_interest(socket, interest) }?)
}
