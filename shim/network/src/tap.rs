//! Taps, with one descriptor per queue pair, and vhost-net.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::ioctl::{IntegerSetter, Opcode, Setter, Updater, ioctl};

use super::error::{NetworkError, NetworkFault};
use super::interface::TapOwner;
use super::netns::Netns;

pub(super) const TUN: &str = "/dev/net/tun";
const VHOST_NET: &str = "/dev/vhost-net";

/// Length of virtio 1's header before each frame, in bytes. The default of a tap is 10.
const VNET_HEADER: libc::c_int = 12;

/// Time limit for a tap that is busy.
const BUSY_LIMIT: Duration = Duration::from_secs(1);

// These take an integer by value.
type SetPersist = IntegerSetter<{ libc::TUNSETPERSIST as Opcode }>;
type SetOwner = IntegerSetter<{ libc::TUNSETOWNER as Opcode }>;
type SetGroup = IntegerSetter<{ libc::TUNSETGROUP as Opcode }>;

// The kernel also writes to this one: it completes the name.
type SetInterface<'a> = Updater<'a, { libc::TUNSETIFF as Opcode }, libc::ifreq>;
type SetVnetHeader = Setter<{ libc::TUNSETVNETHDRSZ as Opcode }, libc::c_int>;

/// Creates a persistent tap.
pub(super) fn create(name: &str, queues: u16, owner: TapOwner) -> Result<(), NetworkFault> {
    let tap = attach(name, queues > 1).map_err(NetworkFault::kernel(format!("adding {name}")))?;
    // SAFETY: these requests take an integer by value.
    let done = unsafe {
        ioctl(&tap, SetOwner::new_usize(owner.uid as usize))
            .and_then(|()| ioctl(&tap, SetGroup::new_usize(owner.gid as usize)))
            .and_then(|()| ioctl(&tap, SetPersist::new_usize(1)))
    };
    done.map_err(NetworkFault::kernel(format!("setting the owner of {name}")))
}

/// Opens each queue of an existing tap.
///
/// A child that another thread forks holds copies of earlier descriptors until it executes its program. A tap with one
/// queue is busy for that time, so this function tries for a second.
pub(super) fn open(name: &str, queues: u16) -> Result<Vec<OwnedFd>, NetworkFault> {
    let deadline = Instant::now() + BUSY_LIMIT;
    let queue = |_| {
        loop {
            match attach(name, queues > 1) {
                Err(e) if e.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                    sleep(Duration::from_millis(5));
                }
                attached => return attached.map(OwnedFd::from),
            }
        }
    };
    (0..queues)
        .map(queue)
        .collect::<io::Result<_>>()
        .map_err(NetworkFault::kernel(format!("opening {name}")))
}

/// Creates a tap that is connected to nothing, in a namespace of its own, and opens each queue. Both vanish with the last
/// descriptor. Blocks.
pub fn unconnected_tap(interface: &str, queues: usize) -> Result<Vec<OwnedFd>, NetworkError> {
    let make = || -> io::Result<Vec<OwnedFd>> {
        let queue = |_| attach("tap0", queues > 1).map(OwnedFd::from);
        Netns::create()?.run(|| (0..queues).map(queue).collect())?
    };
    make()
        .map_err(NetworkFault::kernel("making a tap without a network"))
        .map_err(NetworkFault::for_interface(interface))
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
    // SAFETY: both requests get a value of the type that they take.
    unsafe {
        ioctl(&tap, SetInterface::new(&mut request))?;
        ioctl(&tap, SetVnetHeader::new(VNET_HEADER))?;
    }
    Ok(tap)
}
