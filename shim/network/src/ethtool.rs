//! ethtool ioctls: the driver of a device, and its transmit checksum offload, which rtnetlink cannot set.

use std::io;

use rustix::ioctl::{Opcode, Updater, ioctl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::error::NetworkFault;

/// `struct ethtool_value` of linux/ethtool.h.
#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

/// `ETHTOOL_STXCSUM`.
const SET_TX_CHECKSUM: u32 = 0x17;

/// The start of `struct ethtool_drvinfo`.
#[repr(C)]
struct EthtoolDrvinfo {
    command: u32,
    name: [u8; 32],
    rest: [u8; 160],
}

/// `ETHTOOL_GDRVINFO`.
const GET_DRIVER: u32 = 0x3;

/// The kernel writes to the structure that the request points to.
type Ethtool<'a> = Updater<'a, { libc::SIOCETHTOOL as Opcode }, libc::ifreq>;

/// Makes the kernel fill in the checksums of packets that the pod itself sends: a guest may ignore the flag that they
/// are missing.
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
    // SAFETY: ETHTOOL_STXCSUM reads an `EthtoolValue`.
    unsafe { ask(device, (&raw mut value).cast()) }
}

/// Driver of a device, such as `bridge` or `veth`.
pub(super) fn driver(device: &str) -> io::Result<String> {
    let mut driver = EthtoolDrvinfo {
        command: GET_DRIVER,
        name: [0; 32],
        rest: [0; 160],
    };
    // SAFETY: ETHTOOL_GDRVINFO writes an `EthtoolDrvinfo`.
    unsafe { ask(device, (&raw mut driver).cast()) }?;
    let name = driver.name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// # Safety
/// `command` must point to the structure of the command number in its first field.
unsafe fn ask(device: &str, command: *mut libc::c_char) -> io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: ifreq consists of integers and a union of them, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = command;
    // SAFETY: the request points to the structure of its command, and both outlive the call.
    unsafe { ioctl(&socket, Ethtool::new(&mut request)) }?;
    Ok(())
}
