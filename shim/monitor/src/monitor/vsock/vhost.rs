//! The host's vhost-vsock, by which a guest has a CID of the host's AF_VSOCK.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use rustix::ioctl::{Opcode, Setter, ioctl, opcode};

const DEVICE: &str = "/dev/vhost-vsock";
/// VHOST_VSOCK_SET_GUEST_CID
const SET_GUEST_CID: Opcode = opcode::write::<u64>(0xaf, 0x60);

/// A fault of vhost-vsock.
#[derive(Debug, thiserror::Error)]
pub(in crate::monitor) enum VhostVsockError {
    #[error(
        "autoattachVSOCK needs {DEVICE}: {0}: load the module vhost_vsock, and see that this user may open it"
    )]
    Open(io::Error),
    #[error("status.VSOCKCID {0}: another VM of this host has this CID")]
    InUse(u32),
    #[error("status.VSOCKCID {0}: {1}")]
    Refused(u32, io::Error),
}

/// Opens the device and gives it a CID, which is the guest's until all copies of the descriptor are closed.
pub(in crate::monitor) fn open(cid: u32) -> Result<OwnedFd, VhostVsockError> {
    open_at(DEVICE, cid)
}

fn open_at(path: &str, cid: u32) -> Result<OwnedFd, VhostVsockError> {
    let opened = File::options().read(true).write(true).open(path);
    let file = opened.map_err(VhostVsockError::Open)?;
    // SAFETY: the request reads a u64. On another file it fails: its number is of vhost only.
    let set = unsafe { ioctl(&file, Setter::<SET_GUEST_CID, u64>::new(cid.into())) };
    match set.map_err(io::Error::from) {
        Ok(()) => Ok(file.into()),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(VhostVsockError::InUse(cid)),
        Err(error) => Err(VhostVsockError::Refused(cid, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_is_that_of_the_kernel() {
        // include/uapi/linux/vhost.h
        assert_eq!(SET_GUEST_CID, 0x4008_af60);
    }

    #[test]
    fn a_missing_or_other_device_is_named() {
        let fault = |path| open_at(path, 1234).unwrap_err().to_string();
        assert_eq!(
            fault("/dev/none"),
            "autoattachVSOCK needs /dev/vhost-vsock: No such file or directory (os error 2): load the module \
             vhost_vsock, and see that this user may open it"
        );
        assert_eq!(
            fault("/dev/null"),
            "status.VSOCKCID 1234: Inappropriate ioctl for device (os error 25)"
        );
    }
}
