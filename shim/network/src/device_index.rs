//! Interface indexes of the devices in the calling thread's network namespace.

use rustix::io::Result;
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};

/// Name of the device with an index.
pub(crate) fn name(index: u32) -> Result<String> {
    // A socket of the namespace, of any kind.
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    netdevice::index_to_name(socket, index)
}
