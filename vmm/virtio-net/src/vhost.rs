//! A queue pair in the kernel: vhost-net reads and writes the rings, the tap and guest memory itself.
//!
//! It gets the driver's notifications and interrupts as eventfds, so that no frame passes through this process. While
//! disconnected from the tap, it keeps its position in each ring.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use husk_devices::GuestMemMmap;
use husk_devices::virtio::ActiveQueue;
use vhost::vhost_kern::VhostKernBackend;
use vhost::vhost_kern::vhost_binding::{VHOST_NET_SET_BACKEND, vhost_vring_file};
use vhost::{Error, VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::ioctl_with_ref;

use crate::config::DATAPATH;
use crate::tap::Tap;

/// VIRTIO_F_VERSION_1, which every driver negotiates and which makes headers 12 bytes long in vhost.
const MODERN: u64 = 1 << VIRTIO_F_VERSION_1;

/// An open `/dev/vhost-net`, owned by this process.
#[derive(Debug)]
pub(crate) struct VhostPair {
    fd: OwnedFd,
    features: u64,
    connected: AtomicBool,
}

/// A vhost file with the memory of its rings, for the vhost crate.
struct Backend<'a> {
    fd: BorrowedFd<'a>,
    mem: Arc<GuestMemMmap>,
}

impl AsRawFd for Backend<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl VhostKernBackend for Backend<'_> {
    type AS = Arc<GuestMemMmap>;

    fn mem(&self) -> &Self::AS {
        &self.mem
    }
}

/// Eventfds that vhost signals for a queue: the interrupt of the driver, and errors of the ring.
#[derive(Debug)]
pub(crate) struct VringNotifiers<'a> {
    pub call: &'a EventFd,
    pub error: &'a EventFd,
}

impl VhostPair {
    /// Takes ownership of an open `/dev/vhost-net`. The kernel creates the worker thread of the pair here.
    ///
    /// # Errors
    /// The file is not vhost-net, has an owner, or lacks virtio 1.0.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let mut pair = Self {
            fd,
            features: 0,
            connected: AtomicBool::new(false),
        };
        let backend = pair.backend(&Arc::new(GuestMemMmap::new()));
        backend.set_owner().map_err(os)?;
        pair.features = backend.get_features().map_err(os)?;
        if pair.features & MODERN == 0 {
            return Err(io::Error::other("vhost without virtio 1.0"));
        }
        Ok(pair)
    }

    fn backend(&self, mem: &Arc<GuestMemMmap>) -> Backend<'_> {
        Backend {
            fd: self.fd.as_fd(),
            mem: Arc::clone(mem),
        }
    }

    /// Returns `features` without the datapath features that vhost lacks.
    pub fn limit(&self, features: u64) -> u64 {
        features & (self.features | !DATAPATH)
    }

    /// Takes over the receive and transmit queues at their current positions. No frame passes before
    /// [`VhostPair::connect`].
    pub fn start(
        &self,
        mem: &Arc<GuestMemMmap>,
        features: u64,
        queues: [(&ActiveQueue, VringNotifiers<'_>); 2],
    ) -> io::Result<()> {
        let backend = self.backend(mem);
        backend
            .set_features((features | MODERN) & DATAPATH & self.features)
            .map_err(os)?;
        let regions: Vec<_> = mem
            .iter()
            .map(|region| VhostUserMemoryRegionInfo {
                guest_phys_addr: region.start_addr().raw_value(),
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
                ..VhostUserMemoryRegionInfo::default()
            })
            .collect();
        backend.set_mem_table(&regions).map_err(os)?;
        for (index, (active, notifiers)) in queues.into_iter().enumerate() {
            let queue = &active.queue;
            let rings = rings(mem, queue)
                .ok_or_else(|| io::Error::other(format!("queue {} spans memory regions", active.index)))?;
            backend.set_vring_num(index, queue.size()).map_err(os)?;
            backend.set_vring_base(index, queue.next_avail()).map_err(os)?;
            backend.set_vring_addr(index, &rings).map_err(os)?;
            backend.set_vring_call(index, notifiers.call).map_err(os)?;
            backend.set_vring_err(index, notifiers.error).map_err(os)?;
            backend.set_vring_kick(index, &active.kick).map_err(os)?;
        }
        Ok(())
    }

    /// Connects the queues to `tap`, whose queue is attached, or disconnects them for `None`. Frames in flight are
    /// complete when this returns.
    pub fn connect(&self, tap: Option<&Tap>) -> io::Result<()> {
        if self.connected.load(Ordering::Relaxed) == tap.is_some() {
            return Ok(());
        }
        for index in 0..2 {
            let connected = self.set_backend(index, tap);
            if connected.is_err() && tap.is_some() {
                let _ = self.set_backend(0, None);
            }
            connected?;
        }
        self.connected.store(tap.is_some(), Ordering::Relaxed);
        Ok(())
    }

    fn set_backend(&self, index: u32, tap: Option<&Tap>) -> io::Result<()> {
        let file = vhost_vring_file {
            index,
            fd: tap.map_or(-1, AsRawFd::as_raw_fd),
        };
        // SAFETY: the kernel reads one vhost_vring_file. The queue lies in guest memory and stays there while it is
        // connected: the owner of the memory disconnects it first.
        if unsafe { ioctl_with_ref(&self.fd, VHOST_NET_SET_BACKEND(), &file) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Disconnects, and stores the ring positions of vhost in the queues.
    pub fn stop(&self, mem: &Arc<GuestMemMmap>, queues: [&mut ActiveQueue; 2]) -> io::Result<()> {
        self.connect(None)?;
        let backend = self.backend(mem);
        for (index, active) in queues.into_iter().enumerate() {
            let base = backend.get_vring_base(index).map_err(os)? as u16;
            active.queue.set_next_avail(base);
            // Disconnecting waits for frames in flight: vhost has used all buffers it took.
            active.queue.set_next_used(base);
        }
        Ok(())
    }
}

/// Addresses of the parts of a queue. `None` unless each lies in one region: the kernel uses only the host address of
/// the first byte.
fn rings(mem: &GuestMemMmap, queue: &Queue) -> Option<VringConfigData> {
    let size = usize::from(queue.size());
    let event = if queue.event_idx_enabled() { 2 } else { 0 };
    let whole = |address: u64, len: usize| {
        let mut slices = GuestMemoryBackend::get_slices(mem, GuestAddress(address), len);
        let first = slices.next()?.ok()?;
        (first.len() == len).then_some(address)
    };
    Some(VringConfigData {
        queue_max_size: queue.max_size(),
        queue_size: queue.size(),
        flags: 0,
        desc_table_addr: whole(queue.desc_table(), 16 * size)?,
        avail_ring_addr: whole(queue.avail_ring(), 4 + 2 * size + event)?,
        used_ring_addr: whole(queue.used_ring(), 4 + 8 * size + event)?,
        log_addr: None,
    })
}

fn os(error: Error) -> io::Error {
    match error {
        Error::IoctlError(error) | Error::IOError(error) => error,
        other => io::Error::other(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use husk_devices::virtio::testing::{Driver, memory};
    use vm_memory::GuestAddressSpace;

    use super::*;

    #[test]
    fn a_ring_over_two_regions_is_not_for_the_kernel() {
        let mem = memory(&[(0, 0x2000), (0x2000, 0x2000)]);
        let find = |base| {
            let queue = Driver::new(&mem, 0, 16, base).queue(true).queue;
            rings(&mem.memory(), &queue).map(|rings| rings.used_ring_addr)
        };
        assert_eq!(find(0x1000), Some(0x1128));
        assert_eq!(find(0x1e80), None, "used ring");
        assert_eq!(find(0x1ef0), None, "available ring");
        assert_eq!(find(0x1f80), None, "descriptors");
        assert_eq!(find(0x2000), Some(0x2128));
    }

    #[test]
    fn files_other_than_vhost_net_are_refused() {
        assert!(VhostPair::new(File::open("/dev/null").unwrap().into()).is_err());
    }
}
