//! A tap whose frames have virtio-net headers.

use anyhow::{Context, Result, ensure};
use libc::iovec;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use vmm_sys_util::ioctl::{ioctl_with_ref, ioctl_with_val};

/// Bytes of a header with the number of buffers.
const HEADER: libc::c_int = 12;
const TUN: &str = "/dev/net/tun";

/// A tap that a system call waits for.
#[derive(Debug)]
pub struct Tap(File);

impl Tap {
    /// Attaches to the existing tap `name`, with the offloads of the NIC.
    pub fn open(name: &str) -> Result<Self> {
        let file = File::options().read(true).write(true).open(TUN).context(TUN)?;
        ensure!(name.len() < libc::IFNAMSIZ, "{name}: the name is too long");
        // SAFETY: zeroes are a valid ifreq.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *place = byte as libc::c_char;
        }
        request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
        // SAFETY: the kernel reads one ifreq.
        let attached = unsafe { ioctl_with_ref(&file, libc::TUNSETIFF as _, &request) };
        check(attached).with_context(|| format!("tap {name}"))?;
        // SAFETY: the kernel reads one int.
        check(unsafe { ioctl_with_ref(&file, libc::TUNSETVNETHDRSZ as _, &HEADER) })?;
        let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4;
        // SAFETY: the argument is a number.
        check(unsafe { ioctl_with_val(&file, libc::TUNSETOFFLOAD as _, offloads.into()) })?;
        Ok(Self(file))
    }

    /// Waits for a frame, and returns its bytes with the header.
    ///
    /// # Safety
    /// The parts are in memory that is mapped and that no reference leads to.
    pub unsafe fn receive(&self, parts: &[iovec]) -> io::Result<usize> {
        // SAFETY: the caller vouches for the parts.
        let count = unsafe { libc::readv(self.0.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Sends a frame. The kernel drops it if it is not valid.
    ///
    /// # Safety
    /// The parts are in memory that is mapped.
    pub unsafe fn send(&self, parts: &[iovec]) {
        // SAFETY: the caller vouches for the parts.
        unsafe { libc::writev(self.0.as_raw_fd(), parts.as_ptr(), parts.len() as libc::c_int) };
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
