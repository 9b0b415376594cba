//! Switching a device's transmit checksum offload off, which netlink cannot.

use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::error::Fault;

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

/// ETHTOOL_STXCSUM of linux/ethtool.h.
const SET_TX_CHECKSUM: u32 = 0x17;

nix::ioctl_write_ptr_bad!(ethtool, libc::SIOCETHTOOL as libc::c_ulong, libc::ifreq);

/// What the pod itself sends by the device is given its checksums: a guest may not look at the note that they are missing.
pub(super) fn no_tx_checksum(device: &str) -> Result<(), Fault> {
    set(device).map_err(Fault::kernel(format!(
        "switching off the checksum offload of {device}"
    )))
}

fn set(device: &str) -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: ifreq is integers and a union of such, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    let mut value = Value {
        command: SET_TX_CHECKSUM,
        data: 0,
    };
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    // SAFETY: the request points to `value`, as large as its command asks for; both live through the call.
    unsafe { ethtool(socket.as_raw_fd(), &request) }?;
    Ok(())
}
