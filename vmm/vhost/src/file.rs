//! An open device of vhost.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use husk_devices::GuestMemMmap;
use husk_devices::page_log::PageLog;
use husk_devices::virtio::ActiveQueue;
use vhost::vhost_kern::VhostKernBackend;
use vhost::{Error, VhostBackend, VhostUserMemoryRegionInfo};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_queue::QueueT;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use crate::rings::rings;

/// VIRTIO_F_VERSION_1, which every driver negotiates and which makes the headers of vhost-net 12 bytes long.
const MODERN: u64 = 1 << VIRTIO_F_VERSION_1;
/// VHOST_F_LOG_ALL: vhost marks the pages that it writes.
const LOG_ALL: u64 = 1 << 26;

/// An open device of vhost, such as `/dev/vhost-net`, owned by this process.
#[derive(Debug)]
pub struct VhostFile {
    fd: OwnedFd,
    features: u64,
    logs: Mutex<Logs>,
}

/// Logs of the pages that vhost writes.
#[derive(Debug, Default)]
struct Logs {
    /// For the next start.
    next: Option<Arc<PageLog>>,
    /// That of the last start, whose address the kernel has.
    given: Option<Arc<PageLog>>,
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
pub struct VringNotifiers<'a> {
    /// The interrupt.
    pub call: &'a EventFd,
    /// Errors of the ring.
    pub error: &'a EventFd,
}

impl AsRawFd for VhostFile {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl VhostFile {
    /// Takes ownership of an open device. The kernel creates its worker thread here.
    ///
    /// # Errors
    /// The file is not of vhost, has an owner, or lacks virtio 1.0.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let mut file = Self {
            fd,
            features: 0,
            logs: Mutex::default(),
        };
        let backend = file.backend(&Arc::new(GuestMemMmap::new()));
        backend.set_owner().map_err(os)?;
        file.features = backend.get_features().map_err(os)?;
        if file.features & MODERN == 0 {
            return Err(io::Error::other("vhost without virtio 1.0"));
        }
        Ok(file)
    }

    /// Any file, which is no device of vhost: every operation fails.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn failing(fd: OwnedFd) -> Self {
        Self {
            fd,
            features: MODERN,
            logs: Mutex::default(),
        }
    }

    fn backend(&self, mem: &Arc<GuestMemMmap>) -> Backend<'_> {
        Backend {
            fd: self.fd.as_fd(),
            mem: Arc::clone(mem),
        }
    }

    /// Features of the device.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// From the next [`VhostFile::start`] on, vhost marks the pages that it writes in `log`; with `None`, no longer.
    pub fn log_pages(&self, log: Option<&Arc<PageLog>>) {
        self.logs().next = log.cloned();
    }

    fn logs(&self) -> MutexGuard<'_, Logs> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over the queues at their current positions; the first is queue 0 of the file. The kernel does not touch
    /// them before the device connects them. It is told those of `features` that it has, and virtio 1.0.
    ///
    /// # Errors
    /// A ring spans two regions of memory, or the kernel refuses an operation.
    pub fn start(
        &self,
        mem: &Arc<GuestMemMmap>,
        features: u64,
        queues: [(&ActiveQueue, VringNotifiers<'_>); 2],
    ) -> io::Result<()> {
        let backend = self.backend(mem);
        let features = (features | MODERN) & self.features;
        // No queue is connected, so the kernel writes to no log now. Each ring gets its flags before it is connected.
        backend.set_features(features).map_err(os)?;
        let mut logs = self.logs();
        logs.given = logs.next.clone();
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
        if let Some(log) = &logs.given {
            if self.features & LOG_ALL == 0 {
                return Err(io::Error::other(
                    "vhost without a log of the pages that it writes",
                ));
            }
            backend.set_log_base(log.address(), None).map_err(os)?;
            backend.set_features(features | LOG_ALL).map_err(os)?;
        }
        for (index, (active, notifiers)) in queues.into_iter().enumerate() {
            let queue = &active.queue;
            let rings = rings(mem, queue, logs.given.is_some())
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

    /// Stores the ring positions of vhost in the queues, which the device has disconnected.
    ///
    /// # Errors
    /// The kernel refuses an operation.
    pub fn stop(&self, mem: &Arc<GuestMemMmap>, queues: [&mut ActiveQueue; 2]) -> io::Result<()> {
        let backend = self.backend(mem);
        for (index, active) in queues.into_iter().enumerate() {
            let base = backend.get_vring_base(index).map_err(os)? as u16;
            active.queue.set_next_avail(base);
            // Disconnecting waits for buffers in flight: vhost has used all that it took.
            active.queue.set_next_used(base);
        }
        Ok(())
    }
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

    use super::*;

    #[test]
    fn files_other_than_vhost_are_refused() {
        assert!(VhostFile::new(File::open("/dev/null").unwrap().into()).is_err());
    }
}
