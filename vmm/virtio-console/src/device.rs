//! The device model: features, configuration space, and the worker of the active device.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use husk_devices::component::{ComponentState, RestoreError, SaveError};
use husk_devices::virtio::{ActivateError, Activation, ActiveQueue, VirtioDevice, config_space};
use husk_devices::worker::Worker;
use husk_seccomp::ThreadRole;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

use crate::config::{
    self, CONFIG_SIZE, CONTROL_RECEIVE, CONTROL_TRANSMIT, MAX_NAME_LEN, MAX_PORTS, MULTIPORT, QUEUE_SIZE,
};
use crate::port::Port;
use crate::state;
use crate::worker::{ConsoleWorker, StoppedConsole};

/// Called with a port's name when the guest has opened (true) or closed it, also when a reset closes it. May repeat the
/// present state. Called on device and vCPU threads; must not block.
pub type GuestOpenFn = Arc<dyn Fn(&str, bool) + Send + Sync>;

/// The parameters of a port.
#[derive(Debug)]
pub struct PortSetup {
    /// Name, at most [`MAX_NAME_LEN`] bytes: Linux shows the port as `/dev/virtio-ports/NAME`.
    pub name: String,
    /// A connected stream socket. The device makes it nonblocking. The guest learns when the other end is closed.
    pub stream: OwnedFd,
}

/// A virtio console device (virtio 1.2, section 5.3) whose ports are streams.
pub struct Console {
    /// Names and sockets, from port 1.
    pub(crate) sockets: Vec<(String, Arc<File>)>,
    queue_sizes: Vec<u16>,
    pub(crate) on_guest_open: GuestOpenFn,
    /// The ports as the driver left them, while the device is quiesced.
    pub(crate) ports: Option<Vec<Port>>,
    worker: Option<Worker<StoppedConsole>>,
}

impl std::fmt::Debug for Console {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Console")
            .field("sockets", &self.sockets)
            .field("active", &self.worker.is_some())
            .finish_non_exhaustive()
    }
}

impl Console {
    /// A device with these ports, numbered from 1.
    ///
    /// # Errors
    /// There is no port, or more than [`MAX_PORTS`]; a name is empty, too long or used twice; the kernel refuses to
    /// make a socket nonblocking.
    pub fn new(ports: Vec<PortSetup>, on_guest_open: GuestOpenFn) -> io::Result<Self> {
        let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        if ports.is_empty() || ports.len() > MAX_PORTS {
            return invalid(format!("a console device has 1 to {MAX_PORTS} ports"));
        }
        let mut sockets: Vec<(String, Arc<File>)> = Vec::new();
        for PortSetup { name, stream } in ports {
            if name.is_empty() || name.len() > MAX_NAME_LEN {
                return invalid(format!("the name of a port has 1 to {MAX_NAME_LEN} bytes"));
            }
            if sockets.iter().any(|(other, _)| *other == name) {
                return invalid(format!("there are two ports {name:?}"));
            }
            fcntl_setfl(&stream, fcntl_getfl(&stream)? | OFlags::NONBLOCK)?;
            sockets.push((name, Arc::new(stream.into())));
        }
        Ok(Self {
            queue_sizes: vec![QUEUE_SIZE; config::queue_count(1 + sockets.len())],
            sockets,
            on_guest_open,
            ports: None,
            worker: None,
        })
    }

    /// The ports as a new driver finds them. Nothing is behind port 0: what a driver without
    /// VIRTIO_CONSOLE_F_MULTIPORT sends there is discarded.
    pub(crate) fn new_ports(&self) -> Vec<Port> {
        let port = |(name, socket): &(String, Arc<File>)| Port::new(name.clone(), Some(Arc::clone(socket)));
        let mut ports = vec![Port::new(String::new(), None)];
        ports.extend(self.sockets.iter().map(port));
        ports
    }

    /// Reports that the guest has closed every port: it no longer has a working device.
    fn all_closed(&self) -> impl Fn() + Send + 'static {
        let names: Vec<_> = self.sockets.iter().map(|(name, _)| name.clone()).collect();
        let on_guest_open = Arc::clone(&self.on_guest_open);
        move || names.iter().for_each(|name| on_guest_open(name, false))
    }
}

impl VirtioDevice for Console {
    fn name(&self) -> &str {
        "console"
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn pci_class(&self) -> [u8; 3] {
        [0x07, 0x80, 0x00]
    }

    fn features(&self) -> u64 {
        MULTIPORT
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_size(&self) -> u16 {
        CONFIG_SIZE as u16
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        config_space::read(&config::space(1 + self.sockets.len()), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let mut queues: Vec<Option<ActiveQueue>> = Vec::new();
        queues.resize_with(self.queue_sizes.len(), || None);
        for queue in activation.queues {
            if let Some(slot) = queues.get_mut(usize::from(queue.index)) {
                *slot = Some(queue);
            }
        }
        if activation.features & MULTIPORT != 0 {
            for index in [CONTROL_RECEIVE, CONTROL_TRANSMIT] {
                if queues[index].is_none() {
                    return Err(ActivateError::MissingQueue(index as u16));
                }
            }
        }
        let on_panic = {
            let interrupt = Arc::clone(&activation.interrupt);
            let all_closed = self.all_closed();
            move |message: &str| {
                interrupt.needs_reset(message);
                all_closed();
            }
        };
        let worker = ConsoleWorker {
            queues,
            ports: self.ports.take().unwrap_or_else(|| self.new_ports()),
            mem: activation.mem,
            interrupt: activation.interrupt,
            on_guest_open: Arc::clone(&self.on_guest_open),
        };
        let body = move |stop: &_| worker.run(stop);
        self.worker = Some(Worker::spawn(ThreadRole::Console, "console", on_panic, body)?);
        Ok(())
    }

    fn reset(&mut self) {
        self.quiesce();
        self.ports = None;
        self.all_closed()();
    }

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        match self.worker.take()?.stop() {
            Ok((queues, ports)) => {
                self.ports = Some(ports);
                Some(queues)
            }
            Err(error) => {
                tracing::error!(%error, "the console's queues are lost");
                None
            }
        }
    }

    fn save(&mut self) -> Result<ComponentState, SaveError> {
        state::save(self)
    }

    fn restore(&mut self, state: &ComponentState, _features: u64) -> Result<(), RestoreError> {
        state::restore(self, state)
    }
}
