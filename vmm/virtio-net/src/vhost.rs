//! A queue pair in the kernel: vhost-net reads and writes the rings, the tap and guest memory itself.
//!
//! While disconnected from the tap, it keeps its position in each ring.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use husk_devices::GuestMemMmap;
use husk_devices::page_log::PageLog;
use husk_devices::virtio::ActiveQueue;
use husk_vhost::{VhostFile, VringNotifiers};
use vhost::vhost_kern::vhost_binding::{VHOST_NET_SET_BACKEND, vhost_vring_file};
use vmm_sys_util::ioctl::ioctl_with_ref;

use crate::config::DATAPATH;
use crate::tap::Tap;

/// An open `/dev/vhost-net`, owned by this process.
#[derive(Debug)]
pub(crate) struct VhostPair {
    file: VhostFile,
    connected: AtomicBool,
}

impl VhostPair {
    /// Takes ownership of an open `/dev/vhost-net`. The kernel creates the worker thread of the pair here.
    ///
    /// # Errors
    /// The file is not vhost-net, has an owner, or lacks virtio 1.0.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            file: VhostFile::new(fd)?,
            connected: AtomicBool::new(false),
        })
    }

    /// Returns `features` without the datapath features that vhost lacks.
    pub fn limit(&self, features: u64) -> u64 {
        features & (self.file.features() | !DATAPATH)
    }

    /// Has vhost mark the pages that it writes, from the next [`VhostPair::start`] on.
    pub fn log_pages(&self, log: Option<&Arc<PageLog>>) {
        self.file.log_pages(log);
    }

    /// Takes over the receive and transmit queues at their current positions. No frame passes before
    /// [`VhostPair::connect`].
    pub fn start(
        &self,
        mem: &Arc<GuestMemMmap>,
        features: u64,
        queues: [(&ActiveQueue, VringNotifiers<'_>); 2],
    ) -> io::Result<()> {
        self.file.start(mem, features & DATAPATH, queues)
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
        if unsafe { ioctl_with_ref(&self.file, VHOST_NET_SET_BACKEND(), &file) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Disconnects, and stores the ring positions of vhost in the queues.
    pub fn stop(&self, mem: &Arc<GuestMemMmap>, queues: [&mut ActiveQueue; 2]) -> io::Result<()> {
        self.connect(None)?;
        self.file.stop(mem, queues)
    }
}
