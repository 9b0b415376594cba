//! A device over sockets in place of taps, for programs that test it.

use std::io;
use std::os::fd::OwnedFd;

use crate::tap::Tap;
use crate::{Mac, Net, NetHandle};

/// A device without vhost, with a queue pair for each datagram socket. A datagram is a frame behind its virtio header.
///
/// # Errors
/// The kernel refuses an eventfd.
///
/// # Panics
/// If there is no socket, or one that cannot be made nonblocking.
pub fn over(sockets: Vec<OwnedFd>, mac: Mac, mtu: Option<u16>) -> io::Result<(Net, NetHandle)> {
    let taps = sockets.into_iter().map(Tap::fake).collect();
    Net::over("test".into(), mac, mtu, true, taps, Vec::new())
}
