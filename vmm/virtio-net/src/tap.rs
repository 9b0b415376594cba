//! One queue of a tap device that another process opened and attached.
//!
//! No ioctl here needs a capability: only the first attach of a queue does. Ioctls that concern the whole device go
//! through queue 0, which is never detached.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{c_int, c_short, c_uint};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
    VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6,
};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};

use crate::header::HEADER_LEN;
use crate::mac::Mac;

/// Addresses the kernel compares in full; those beyond are hashed.
const EXACT: usize = 8;

/// Addresses of one filter.
const MAX_ADDRESSES: usize = EXACT + 2 * crate::mac::MAC_TABLE_SIZE;

/// `struct tun_filter`: the receive filter of a tap. The default passes everything.
#[repr(C)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TapFilter {
    flags: u16,
    count: u16,
    addresses: [Mac; MAX_ADDRESSES],
}

impl Default for TapFilter {
    fn default() -> Self {
        Self {
            flags: 0,
            count: 0,
            addresses: [[0; 6]; MAX_ADDRESSES],
        }
    }
}

impl TapFilter {
    /// Passes frames to `exact` and `multicast`, and to other multicast addresses with `all_multicast`.
    pub fn new(exact: &[Mac], multicast: &[Mac], all_multicast: bool) -> Self {
        let mut filter = Self::default();
        if exact.len() > EXACT {
            return filter;
        }
        let mut count = 0;
        for (place, address) in filter.addresses.iter_mut().zip(exact.iter().chain(multicast)) {
            *place = *address;
            count += 1;
        }
        filter.count = count;
        filter.flags = if all_multicast {
            libc::TUN_FLT_ALLMULTI as u16
        } else {
            0
        };
        filter
    }

    /// True if the kernel passes a frame to `address`, assuming a hash without collisions.
    #[cfg(test)]
    pub fn passes(&self, address: &Mac) -> bool {
        let addresses = &self.addresses[..usize::from(self.count)];
        let multicast = |address: &Mac| address[0] & 1 != 0;
        let off = addresses.is_empty() || !addresses.iter().skip(EXACT).all(multicast);
        let all = multicast(address) && self.flags != 0;
        off || all || addresses.contains(address)
    }
}

/// The settings of a tap, as far as they are known.
#[derive(Debug, Default)]
struct TapSettings {
    offloads: Option<c_uint>,
    filter: Option<TapFilter>,
}

/// One queue of a tap.
#[derive(Debug)]
pub(crate) struct Tap {
    fd: OwnedFd,
    attached: AtomicBool,
    settings: Mutex<TapSettings>,
    /// A socket in place of a tap: it has frames but no settings.
    #[cfg(any(test, feature = "testing"))]
    fake: bool,
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Tap {
    /// Takes ownership of a queue.
    ///
    /// # Errors
    /// It is not a queue of a tap with virtio-net headers, or one of several queues and not `multi_queue`.
    pub fn new(fd: OwnedFd, multi_queue: bool) -> io::Result<Self> {
        let tap = Self {
            fd,
            attached: AtomicBool::new(true),
            settings: Mutex::default(),
            #[cfg(any(test, feature = "testing"))]
            fake: false,
        };
        let mut request = interface_request(0);
        // SAFETY: the kernel fills one ifreq, `request`.
        check(unsafe { ioctl_with_mut_ref(&tap.fd, libc::TUNGETIFF as _, &mut request) })
            .map_err(|e| io::Error::new(e.kind(), format!("not a queue of a tap: {e}")))?;
        // SAFETY: the kernel has set the flags.
        let flags = c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        for (flag, name) in [
            (libc::IFF_TAP, "IFF_TAP"),
            (libc::IFF_VNET_HDR, "IFF_VNET_HDR"),
            (libc::IFF_NO_PI, "IFF_NO_PI"),
            (
                if multi_queue { libc::IFF_MULTI_QUEUE } else { 0 },
                "IFF_MULTI_QUEUE",
            ),
        ] {
            if flags & flag != flag {
                return Err(io::Error::other(format!("the tap was opened without {name}")));
            }
        }
        let size = HEADER_LEN as c_int;
        // SAFETY: the kernel reads one int.
        check(unsafe { ioctl_with_ref(&tap.fd, libc::TUNSETVNETHDRSZ as _, &size) })?;
        tap.set_nonblocking()?;
        Ok(tap)
    }

    /// A fake tap: frames with their headers on a socket.
    #[cfg(any(test, feature = "testing"))]
    pub fn fake(fd: OwnedFd) -> Self {
        let attached = AtomicBool::new(true);
        let tap = Self {
            fd,
            attached,
            settings: Mutex::default(),
            fake: true,
        };
        tap.set_nonblocking().unwrap();
        tap
    }

    fn set_nonblocking(&self) -> io::Result<()> {
        Ok(fcntl_setfl(&self.fd, fcntl_getfl(&self.fd)? | OFlags::NONBLOCK)?)
    }

    fn is_fake(&self) -> bool {
        #[cfg(any(test, feature = "testing"))]
        return self.fake;
        #[cfg(not(any(test, feature = "testing")))]
        false
    }

    /// True if the tap supports UDP segmentation (Linux 6.2). Leaves all offloads off.
    pub fn has_uso(&self) -> bool {
        let uso = libc::TUN_F_CSUM | libc::TUN_F_USO4 | libc::TUN_F_USO6;
        let known = self.set_offload_flags(uso).is_ok();
        let _ = self.set_offload_flags(0);
        known
    }

    /// Sets the receive offloads of these virtio feature bits. Returns false if the tap has them.
    pub fn set_offloads(&self, features: u64) -> io::Result<bool> {
        self.set_offload_flags(offload_flags(features))
    }

    fn set_offload_flags(&self, flags: c_uint) -> io::Result<bool> {
        change(&mut self.settings().offloads, flags, |flags| {
            if self.is_fake() {
                return Ok(());
            }
            // SAFETY: the argument is a number.
            check(unsafe { ioctl_with_val(&self.fd, libc::TUNSETOFFLOAD as _, (*flags).into()) })
        })
    }

    /// Sets the receive filter of the tap. Returns false if the tap has it.
    pub fn set_filter(&self, filter: TapFilter) -> io::Result<bool> {
        change(&mut self.settings().filter, filter, |filter| {
            if self.is_fake() {
                return Ok(());
            }
            // SAFETY: the kernel reads a tun_filter and as many addresses after it as its count says, all of which
            // are in `filter`.
            check(unsafe { ioctl_with_ref(&self.fd, libc::TUNSETTXFILTER as _, filter) })
        })
    }

    fn settings(&self) -> MutexGuard<'_, TapSettings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Attaches or detaches the queue. Frames waiting in a detached queue are lost.
    pub fn attach(&self, attached: bool) -> io::Result<()> {
        if self.is_fake() || self.attached.load(Ordering::Relaxed) == attached {
            return Ok(());
        }
        let request = interface_request(if attached {
            libc::IFF_ATTACH_QUEUE
        } else {
            libc::IFF_DETACH_QUEUE
        });
        // SAFETY: the kernel reads one ifreq.
        check(unsafe { ioctl_with_ref(&self.fd, libc::TUNSETQUEUE as _, &request) })?;
        self.attached.store(attached, Ordering::Relaxed);
        Ok(())
    }

    /// Reads one frame into `slices`, which lie end to end, and returns how much of them it filled.
    ///
    /// # Safety
    /// Each slice is memory that may be written, by the kernel and by others at the same time, until this returns.
    pub unsafe fn read(&self, slices: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: the slices are writable, says the caller.
        let read = unsafe { libc::readv(self.as_raw_fd(), slices.as_ptr(), slices.len() as c_int) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    /// Writes one frame.
    ///
    /// # Safety
    /// Each slice is memory that may be read until this returns.
    pub unsafe fn write(&self, slices: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: the slices are readable, says the caller.
        let written = unsafe { libc::writev(self.as_raw_fd(), slices.as_ptr(), slices.len() as c_int) };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }

    /// Drops the frames that wait in the queue, up to a limit in case more keep arriving.
    pub fn drain(&self) {
        const MOST: usize = 8192;
        let mut header = [0_u8; HEADER_LEN];
        let slice = libc::iovec {
            iov_base: header.as_mut_ptr().cast(),
            iov_len: HEADER_LEN,
        };
        for _ in 0..MOST {
            // SAFETY: the slice is `header`. The rest of the frame is discarded.
            if unsafe { self.read(&[slice]) }.is_err() {
                break;
            }
        }
    }
}

/// Flags of TUNSETOFFLOAD for these features, without the combinations that it rejects.
fn offload_flags(features: u64) -> c_uint {
    let flag = |bit: u32, flag: c_uint| if features & 1 << bit == 0 { 0 } else { flag };
    if flag(VIRTIO_NET_F_GUEST_CSUM, 1) == 0 {
        return 0;
    }
    let tso =
        flag(VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4) | flag(VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6);
    let ecn = if tso == 0 {
        0
    } else {
        flag(VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN)
    };
    let both = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    let uso =
        flag(VIRTIO_NET_F_GUEST_USO4, libc::TUN_F_USO4) | flag(VIRTIO_NET_F_GUEST_USO6, libc::TUN_F_USO6);
    libc::TUN_F_CSUM | tso | ecn | if uso == both { both } else { 0 }
}

/// Makes `setting` the wanted one. Returns false if it is: the kernel takes host-wide locks for each ioctl.
fn change<T: PartialEq>(
    setting: &mut Option<T>,
    wanted: T,
    set: impl FnOnce(&T) -> io::Result<()>,
) -> io::Result<bool> {
    if setting.as_ref() == Some(&wanted) {
        return Ok(false);
    }
    // Not known if this fails.
    *setting = None;
    set(&wanted)?;
    *setting = Some(wanted);
    Ok(true)
}

fn interface_request(flags: c_int) -> libc::ifreq {
    libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: flags as c_short,
        },
    }
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn offload_flags_are_combinations_that_the_kernel_accepts() {
        let bits = |bits: &[u32]| offload_flags(bits.iter().fold(0, |all, bit| all | 1 << bit));
        assert_eq!(bits(&[VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_ECN]), 0);
        assert_eq!(bits(&[VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN]), 1);
        assert_eq!(bits(&[VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_USO4]), 1);
        assert_eq!(bits(&[1, 7, 8, 9]), 0xf);
        assert_eq!(bits(&[1, 7, 54, 55]), 0x63);
    }

    #[test]
    fn a_setting_that_the_tap_has_is_not_set_again() {
        let mut setting = None;
        let mut set = |wanted, result: io::Result<()>| change(&mut setting, wanted, |_| result).ok();
        let failed = || Err(io::Error::from_raw_os_error(libc::ENOMEM));
        assert_eq!(
            [set(1, Ok(())), set(1, failed()), set(2, Ok(()))],
            [Some(true), Some(false), Some(true)]
        );
        assert_eq!(
            [set(1, failed()), set(2, Ok(())), set(2, Ok(()))],
            [None, Some(true), Some(false)]
        );
    }

    #[test]
    fn files_other_than_taps_are_refused() {
        let file = File::open("/dev/null").unwrap();
        let error = Tap::new(file.into(), false).unwrap_err();
        assert!(error.to_string().starts_with("not a queue of a tap"), "{error}");
    }
}
