//! What is asked of a device by ethtool: switching its transmit checksum offload off, which netlink cannot, and its kind.

use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::error::NetworkFault;

/// `struct ethtool_value`.
#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

/// ETHTOOL_STXCSUM of linux/ethtool.h.
const SET_TX_CHECKSUM: u32 = 0x17;

/// The beginning of `struct ethtool_drvinfo`.
#[repr(C)]
struct EthtoolDrvinfo {
    command: u32,
    name: [u8; 32],
    rest: [u8; 160],
}

/// ETHTOOL_GDRVINFO.
const GET_DRIVER: u32 = 0x3;

nix::ioctl_write_ptr_bad!(ethtool, libc::SIOCETHTOOL as libc::c_ulong, libc::ifreq);

/// What the pod itself sends by the device is given its checksums: a guest may not look at the note that they are missing.
pub(super) fn disable_tx_checksum(device: &str) -> Result<(), NetworkFault> {
    set(device).map_err(NetworkFault::kernel(format!(
        "switching off the checksum offload of {device}"
    )))
}

fn set(device: &str) -> io::Result<()> {
    let mut value = EthtoolValue {
        command: SET_TX_CHECKSUM,
        data: 0,
    };
    // SAFETY: the command asks for a `EthtoolValue`.
    unsafe { ask(device, (&raw mut value).cast()) }
}

/// The driver of a device, such as `bridge` or `veth`.
pub(super) fn driver(device: &str) -> io::Result<String> {
    let mut driver = EthtoolDrvinfo {
        command: GET_DRIVER,
        name: [0; 32],
        rest: [0; 160],
    };
    // SAFETY: the command asks for a `EthtoolDrvinfo`.
    unsafe { ask(device, (&raw mut driver).cast()) }?;
    let name = driver.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// # Safety
/// `command` points to what ethtool asks for with the command that is in it.
unsafe fn ask(device: &str, command: *mut libc::c_char) -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: ifreq is integers and a union of such, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = command;
    // SAFETY: the request points to what its command asks for; both live through the call.
    unsafe { ethtool(socket.as_raw_fd(), &request) }?;
    Ok(())
}
