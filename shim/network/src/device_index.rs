//! Interface indexes of the devices in the calling thread's network namespace.

use std::os::fd::OwnedFd;

use rustix::io::Result;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};

/// Index of a device.
pub(crate) fn of(device: &str) -> Result<u32> {
    netdevice::name_to_index(socket()?, device)
}

/// Name of the device with an index.
pub(crate) fn name(index: u32) -> Result<String> {
    netdevice::index_to_name(socket()?, index)
}

/// A socket of the namespace, of any kind.
fn socket() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
}
