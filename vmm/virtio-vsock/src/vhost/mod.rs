//! The device whose receive and transmit queues are the kernel's. The event queue stays with the device, which has no
//! event to send.

mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use husk_devices::GuestMemMmap;
use husk_devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice, config_space};
use husk_devices::worker::Worker;
use husk_seccomp::ThreadRole;
use husk_vhost::{VhostFile, VringNotifiers, call_event};
use vhost::vhost_kern::vhost_binding::VHOST_VSOCK_SET_RUNNING;
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::GuestAddressSpace;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::ioctl::ioctl_with_ref;

use crate::device::QUEUE_SIZES;
use crate::queues::{RECEIVE, TRANSMIT};
use worker::NotifierWorker;

/// VIRTIO_VSOCK_F_SEQPACKET. Stream sockets need no feature bit (section 5.10.3).
const SEQPACKET: u64 = 1 << 1;
/// Features that are offered if the kernel has them.
const OFFERED: u64 = SEQPACKET | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;

/// A virtio socket device (virtio 1.3, section 5.10) by vhost-vsock. The guest's CID is one of the host's AF_VSOCK.
#[derive(Debug)]
pub struct VhostVsock {
    guest_cid: u64,
    file: VhostFile,
    active: Option<ActiveVhost>,
}

/// The queues of a driver.
#[derive(Debug)]
struct ActiveVhost {
    /// Dropped before the queues, because it waits for their eventfds.
    worker: Worker<()>,
    /// Receive and transmit queue.
    in_vhost: [ActiveQueue; 2],
    event_queue: Option<ActiveQueue>,
    mem: Arc<GuestMemMmap>,
}

impl VhostVsock {
    /// A device over an open `/dev/vhost-vsock` whose CID is already `guest_cid`. The kernel creates the worker thread
    /// here.
    ///
    /// # Errors
    /// The file is not of vhost, has an owner, or lacks virtio 1.0.
    pub fn new(guest_cid: u32, file: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            guest_cid: guest_cid.into(),
            file: VhostFile::new(file)?,
            active: None,
        })
    }

    /// Connects the queues to the sockets of the host, or disconnects them. Packets in flight are complete when this
    /// returns.
    fn set_running(&self, running: bool) -> io::Result<()> {
        let running = std::ffi::c_int::from(running);
        // SAFETY: the kernel reads one int. The queues lie in guest memory and stay there while they are connected:
        // the owner of the memory disconnects them first.
        if unsafe { ioctl_with_ref(&self.file, VHOST_VSOCK_SET_RUNNING(), &running) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    fn start(
        &self,
        activation: &Activation,
        mem: &Arc<GuestMemMmap>,
        queues: &[ActiveQueue; 2],
    ) -> io::Result<Worker<()>> {
        let error = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let (interrupt, mut calls) = (&activation.interrupt, Vec::new());
        let mut call = |active: &ActiveQueue| call_event(&**interrupt, active.index, &mut calls);
        let notifiers = [call(&queues[0])?, call(&queues[1])?];
        let with_notifiers = |at: usize| {
            let (call, error) = (&notifiers[at], &error);
            (&queues[at], VringNotifiers { call, error })
        };
        let features = activation.features & OFFERED;
        self.file.start(mem, features, [0, 1].map(with_notifiers))?;
        let worker = NotifierWorker {
            interrupt: Arc::clone(interrupt),
            calls,
            error,
        };
        let on_panic = {
            let interrupt = Arc::clone(interrupt);
            move |message: &str| interrupt.needs_reset(message)
        };
        let worker = Worker::spawn(ThreadRole::Vsock, "vsock", on_panic, move |stop| worker.run(stop))?;
        self.set_running(true)?;
        Ok(worker)
    }
}

impl VirtioDevice for VhostVsock {
    fn name(&self) -> &str {
        "vsock"
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn pci_class(&self) -> [u8; 3] {
        [0x07, 0x80, 0x00]
    }

    fn features(&self) -> u64 {
        OFFERED & self.file.features()
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_size(&self) -> u16 {
        8
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        config_space::read(&self.guest_cid.to_le_bytes(), offset, data);
    }

    fn activate(&mut self, mut activation: Activation) -> Result<(), ActivateError> {
        let mut queues: [Option<ActiveQueue>; QUEUE_SIZES.len()] = [const { None }; _];
        for queue in std::mem::take(&mut activation.queues) {
            if let Some(slot) = queues.get_mut(usize::from(queue.index)) {
                *slot = Some(queue);
            }
        }
        let [receive, transmit, event_queue] = queues;
        let missing = |index: usize| ActivateError::MissingQueue(index as u16);
        let in_vhost = [
            receive.ok_or(missing(RECEIVE))?,
            transmit.ok_or(missing(TRANSMIT))?,
        ];
        let mem = activation.mem.memory().into_inner();
        let worker = self.start(&activation, &mem, &in_vhost)?;
        self.active = Some(ActiveVhost {
            worker,
            in_vhost,
            event_queue,
            mem,
        });
        Ok(())
    }

    fn reset(&mut self) {
        self.quiesce();
    }

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        let ActiveVhost {
            worker,
            in_vhost: [mut receive, mut transmit],
            event_queue,
            mem,
        } = self.active.take()?;
        let stopped = self.set_running(false);
        let stopped = stopped.and_then(|()| self.file.stop(&mem, [&mut receive, &mut transmit]));
        let mut queues: Vec<_> = event_queue.into_iter().collect();
        match stopped {
            Ok(()) => queues.extend([receive, transmit]),
            // Their positions in the rings are unknown. The transport notices that they are missing, and has the driver
            // reset the device.
            Err(error) => tracing::error!(%error, "vhost-vsock did not release its queues"),
        }
        // After the queues, so that no interrupt of theirs is lost.
        if let Err(error) = worker.stop() {
            tracing::error!(%error, "the notifier of vhost-vsock failed");
        }
        Some(queues)
    }
}

#[cfg(test)]
mod tests;
