//! Taps, with one descriptor per queue pair, and vhost-net.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use super::error::NetworkFault;
use super::interface::TapOwner;

pub(super) const TUN: &str = "/dev/net/tun";
const VHOST_NET: &str = "/dev/vhost-net";

/// Length of virtio 1's header before each frame, in bytes. The default of a tap is 10.
const VNET_HEADER: libc::c_int = 12;

mod ioctl {
    nix::ioctl_write_ptr_bad!(set_iff, libc::TUNSETIFF as libc::c_ulong, libc::ifreq);
    nix::ioctl_write_int_bad!(set_persist, libc::TUNSETPERSIST as libc::c_ulong);
    nix::ioctl_write_int_bad!(set_owner, libc::TUNSETOWNER as libc::c_ulong);
    nix::ioctl_write_int_bad!(set_group, libc::TUNSETGROUP as libc::c_ulong);
    nix::ioctl_write_ptr_bad!(
        set_vnet_hdr_sz,
        libc::TUNSETVNETHDRSZ as libc::c_ulong,
        libc::c_int
    );
}

/// Creates a persistent tap.
pub(super) fn create(name: &str, queues: u16, owner: TapOwner) -> Result<(), NetworkFault> {
    let tap = attach(name, queues > 1).map_err(NetworkFault::kernel(format!("adding {name}")))?;
    let set = |done: nix::Result<libc::c_int>| {
        done.map(drop)
            .map_err(NetworkFault::kernel(format!("setting the owner of {name}")))
    };
    // SAFETY: these requests take an integer by value, and the descriptor is open.
    unsafe {
        set(ioctl::set_owner(tap.as_raw_fd(), owner.uid as libc::c_int))?;
        set(ioctl::set_group(tap.as_raw_fd(), owner.gid as libc::c_int))?;
        set(ioctl::set_persist(tap.as_raw_fd(), 1))
    }
}

/// Opens each queue of an existing tap.
pub(super) fn open(name: &str, queues: u16) -> Result<Vec<OwnedFd>, NetworkFault> {
    let queue = |_| attach(name, queues > 1).map(OwnedFd::from);
    (0..queues)
        .map(queue)
        .collect::<io::Result<_>>()
        .map_err(NetworkFault::kernel(format!("opening {name}")))
}

/// Opens vhost-net once per queue pair. Empty if the kernel lacks it or this process may not open it: the VMM then
/// forwards the frames itself.
pub(super) fn vhost(queues: u16) -> Result<Vec<OwnedFd>, NetworkFault> {
    let mut files = Vec::new();
    for _ in 0..queues {
        match OpenOptions::new().read(true).write(true).open(VHOST_NET) {
            Ok(file) => files.push(file.into()),
            // A device node without a driver.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)) => {
                return Ok(Vec::new());
            }
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                tracing::warn!("{VHOST_NET}: {e}: the guest's frames pass through the VMM, which is slower");
                return Ok(Vec::new());
            }
            Err(e) => return Err(NetworkFault::io(VHOST_NET)(e)),
        }
    }
    Ok(files)
}

fn attach(name: &str, multi_queue: bool) -> io::Result<File> {
    let tap = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(TUN)?;
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if multi_queue {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    // SAFETY: ifreq consists of integers and a union of them, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: both pointers point to values of the type that the request reads, and outlive the call.
    unsafe {
        ioctl::set_iff(tap.as_raw_fd(), &request)?;
        ioctl::set_vnet_hdr_sz(tap.as_raw_fd(), &VNET_HEADER)?;
    }
    Ok(tap)
}
