//! The device model: features, configuration space, and the worker of the active device.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;

use husk_devices::component::{ComponentState, RestoreError, SaveError, check};
use husk_devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice, config_space};
use husk_devices::worker::Worker;
use husk_seccomp::ThreadRole;
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::connections::{Connections, FIRST_HOST_PORT, RequestFn};
use crate::handle::{Message, VsockHandle};
use crate::queues::{PacketQueues, RECEIVE, TRANSMIT};
use crate::worker::{StoppedVsock, VsockWorker};

/// VIRTIO_VSOCK_F_STREAM
const STREAM: u64 = 1;
/// Receive, transmit and event queue. Linux gives the receive queue a buffer of 4 KiB for each entry.
pub(crate) const QUEUE_SIZES: [u16; 3] = [128, 128, 16];

/// A virtio socket device (virtio 1.3, section 5.10) with stream sockets.
pub struct Vsock {
    guest_cid: u64,
    next_host_port: Arc<AtomicU32>,
    ids: Arc<AtomicU64>,
    on_request: RequestFn,
    handle: VsockHandle,
    /// The connections as the driver left them, and what the host wants, while the device is quiesced.
    stopped: Option<(Connections, Receiver<Message>)>,
    worker: Option<Worker<StoppedVsock>>,
    /// The driver has connections of a saved device, which have ended, and does not know it yet.
    transport_reset: bool,
}

/// No connection survives: the other ends are the host's.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct VsockState {
    /// There was a driver, which may have had connections.
    active: bool,
    /// Port of the host for the next connection that the host begins.
    #[serde(default = "first_host_port")]
    next_host_port: u32,
}

fn first_host_port() -> u32 {
    FIRST_HOST_PORT
}

impl std::fmt::Debug for Vsock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vsock")
            .field("guest_cid", &self.guest_cid)
            .field("active", &self.worker.is_some())
            .finish_non_exhaustive()
    }
}

impl Vsock {
    /// A device whose guest has the given CID, at least 3.
    ///
    /// # Errors
    /// The kernel refuses an eventfd.
    pub fn new(guest_cid: u32, on_request: RequestFn) -> io::Result<(Self, VsockHandle)> {
        let handle = VsockHandle::new()?;
        let device = Self {
            guest_cid: guest_cid.into(),
            next_host_port: Arc::new(FIRST_HOST_PORT.into()),
            ids: Arc::default(),
            on_request,
            handle: handle.clone(),
            stopped: None,
            worker: None,
            transport_reset: false,
        };
        Ok((device, handle))
    }
}

impl VirtioDevice for Vsock {
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
        STREAM | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
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

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut queues: [Option<ActiveQueue>; QUEUE_SIZES.len()] = [const { None }; _];
        for queue in activation.queues {
            if let Some(slot) = queues.get_mut(usize::from(queue.index)) {
                *slot = Some(queue);
            }
        }
        let [receive, transmit, event_queue] = queues;
        let missing = |index: usize| ActivateError::MissingQueue(index as u16);
        let receive = receive.ok_or(missing(RECEIVE))?;
        let transmit = transmit.ok_or(missing(TRANSMIT))?;
        let (connections, messages) = match self.stopped.take() {
            Some(stopped) => stopped,
            None => {
                let connections = Connections::new(
                    self.guest_cid,
                    Arc::clone(&self.next_host_port),
                    Arc::clone(&self.ids),
                    Arc::clone(&self.on_request),
                )?;
                (connections, self.handle.open())
            }
        };
        let on_panic = {
            let (interrupt, handle) = (Arc::clone(&activation.interrupt), self.handle.clone());
            move |message: &str| {
                interrupt.needs_reset(message);
                handle.close();
            }
        };
        let worker = VsockWorker {
            queues: PacketQueues {
                receive,
                transmit,
                mem: activation.mem,
                interrupt: activation.interrupt,
                packet: Vec::new(),
                readable: Vec::new(),
                writable: Vec::new(),
            },
            event_queue,
            transport_reset: std::mem::take(&mut self.transport_reset),
            connections,
            messages,
            handle: self.handle.clone(),
        };
        let body = move |stop: &_| worker.run(stop);
        self.worker = Some(Worker::spawn(ThreadRole::Vsock, "vsock", on_panic, body)?);
        Ok(())
    }

    fn reset(&mut self) {
        self.quiesce();
        self.handle.close();
        self.stopped = None;
        self.transport_reset = false;
    }

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        match self.worker.take()?.stop() {
            Ok(stopped) => {
                self.stopped = Some((stopped.connections, stopped.messages));
                self.transport_reset = stopped.transport_reset;
                Some(stopped.queues)
            }
            Err(error) => {
                tracing::error!(%error, "the vsock device's queues are lost");
                None
            }
        }
    }

    fn save(&mut self) -> Result<ComponentState, SaveError> {
        let active = self.stopped.is_some() || self.transport_reset;
        let next_host_port = self.next_host_port.load(Ordering::Relaxed);
        ComponentState::new(&VsockState {
            active,
            next_host_port,
        })
    }

    fn restore(&mut self, state: &ComponentState, _features: u64) -> Result<(), RestoreError> {
        let VsockState {
            active,
            next_host_port,
        } = state.parse()?;
        let is_of_host = (FIRST_HOST_PORT..2 * FIRST_HOST_PORT).contains(&next_host_port);
        check(
            is_of_host,
            "next_host_port",
            "is not a port that the device gives",
        )?;
        self.reset();
        self.next_host_port.store(next_host_port, Ordering::Relaxed);
        self.transport_reset = active;
        Ok(())
    }
}
