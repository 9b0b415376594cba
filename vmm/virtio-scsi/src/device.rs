//! The virtio device: features, configuration space, and the actor that gets the queues.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use husk_devices::component::{ComponentState, RestoreError, SaveError};
use husk_devices::virtio::{
    ActivateError, Activation, ActiveQueue, VirtioDevice, VirtioInterrupt, config_space,
};
use husk_devices::worker::Worker;
use husk_disk::{Engine, EngineKind};
use husk_seccomp::ThreadRole;
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_ids::VIRTIO_ID_SCSI;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::actor::Actor;
use crate::config::{self, Sizes};
use crate::controller::{Controller, ControllerConfig, ControllerState, OnIoError};
use crate::handle::{AckSender, ControllerMessage, Mailbox};
use crate::virtqueues::{Driver, REQUEST};
use crate::{MAX_REQUEST_QUEUES, NewUnit, QUEUE_SIZE, ScsiError, ScsiHandle};

/// Requests in flight over all units. Further requests wait in their queues.
const DEPTH: u16 = 512;

/// Maximum number of disks of a controller. Each slot takes 16 bytes in the host's kernel.
pub const MAX_DISKS: u32 = 4096;

/// Time that a driver has to release a unit that is being removed.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Configuration of a controller.
pub struct ScsiConfig {
    /// Number of request queues: from 1 to [`MAX_REQUEST_QUEUES`].
    pub queues: u16,
    /// The highest target number. A driver probes every target.
    pub max_target: u8,
    /// Units that exist from the start.
    pub units: Vec<NewUnit>,
    /// I/O backend.
    pub engine: EngineKind,
    /// See [`OnIoError`].
    pub on_io_error: OnIoError,
}

impl std::fmt::Debug for ScsiConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScsiConfig")
            .field("queues", &self.queues)
            .field("max_target", &self.max_target)
            .field("units", &self.units)
            .finish_non_exhaustive()
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScsiState {
    /// Field sizes that the driver set, in bytes.
    cdb_size: u8,
    sense_size: u16,
    controller: ControllerState,
}

/// Error of [`VirtioScsi::new`].
pub(crate) type NewError = ScsiError;

type SharedInterrupt = Arc<Mutex<Option<Arc<dyn VirtioInterrupt>>>>;

/// A virtio SCSI controller (virtio 1.2, section 5.6).
pub struct VirtioScsi {
    max_target: u8,
    queue_sizes: Vec<u16>,
    sizes: Sizes,
    mailbox: Mailbox,
    active: bool,
    /// The driver's interrupt, to report a panic of the actor.
    interrupt: SharedInterrupt,
    /// Dropping it ends the thread.
    actor: Worker<()>,
}

impl std::fmt::Debug for VirtioScsi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtioScsi")
            .field("active", &self.active)
            .field("actor", &self.actor)
            .finish_non_exhaustive()
    }
}

impl VirtioScsi {
    /// Creates a controller and its handle, with all kernel objects except those for disks.
    ///
    /// # Errors
    /// The kernel refuses an engine or a thread, or a unit is not supported.
    pub fn new(setup: ScsiConfig) -> Result<(Self, ScsiHandle), NewError> {
        let engine = Engine::new(setup.engine, DEPTH, MAX_DISKS).map_err(of_controller)?;
        Self::with_engine(setup, engine, REMOVAL_TIMEOUT)
    }

    pub(crate) fn with_engine(
        setup: ScsiConfig,
        engine: Engine,
        removal_timeout: Duration,
    ) -> Result<(Self, ScsiHandle), NewError> {
        let ScsiConfig {
            queues,
            max_target,
            units,
            on_io_error,
            ..
        } = setup;
        let config = ControllerConfig {
            max_target,
            removal_timeout,
            on_io_error,
        };
        let wakeup = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(of_controller)?;
        let mut controller = Controller::new(engine, config, wakeup.try_clone().map_err(of_controller)?);
        for unit in units {
            controller.add(unit)?;
        }
        let (mailbox, messages) = Mailbox::new(wakeup.try_clone().map_err(of_controller)?);
        let actor = Actor {
            controller,
            messages,
            wakeup,
        };
        let interrupt = SharedInterrupt::default();
        let on_panic = {
            let interrupt = Arc::clone(&interrupt);
            move |message: &str| {
                let interrupt = interrupt.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(interrupt) = interrupt.as_ref() {
                    interrupt.needs_reset(message);
                }
            }
        };
        let actor = Worker::spawn(ThreadRole::Scsi, "scsi", on_panic, move |stop| actor.run(stop))
            .map_err(of_controller)?;
        let queues = REQUEST + queues.clamp(1, MAX_REQUEST_QUEUES);
        let scsi = Self {
            max_target,
            queue_sizes: vec![QUEUE_SIZE; queues.into()],
            sizes: Sizes::DEFAULT,
            mailbox: mailbox.clone(),
            active: false,
            interrupt,
            actor,
        };
        Ok((scsi, ScsiHandle(mailbox)))
    }

    fn request_queues(&self) -> u16 {
        self.queue_sizes.len() as u16 - REQUEST
    }

    /// Sends a message to the actor and waits for the answer. `None` if the actor has ended.
    fn ask<T>(&self, message: impl FnOnce(AckSender<T>) -> ControllerMessage) -> Option<T> {
        let (ack, answer) = mpsc::sync_channel(1);
        self.mailbox.send(message(ack));
        answer.recv().ok()
    }

    fn set_interrupt(&self, interrupt: Option<Arc<dyn VirtioInterrupt>>) {
        *self.interrupt.lock().unwrap_or_else(PoisonError::into_inner) = interrupt;
    }
}

fn of_controller(error: io::Error) -> ScsiError {
    ScsiError::Io("controller".into(), error)
}

impl VirtioDevice for VirtioScsi {
    fn name(&self) -> &str {
        "scsi"
    }

    fn device_type(&self) -> u32 {
        VIRTIO_ID_SCSI
    }

    fn pci_class(&self) -> [u8; 3] {
        [0x01, 0x00, 0x00]
    }

    fn features(&self) -> u64 {
        config::features()
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_size(&self) -> u16 {
        config::CONFIG_SIZE as u16
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = config::space(self.request_queues(), self.max_target, self.sizes);
        config_space::read(&space, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.sizes.write(offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let Activation {
            mem,
            features,
            queues,
            interrupt,
        } = activation;
        if !queues.iter().any(|queue| queue.index >= REQUEST) {
            return Err(ActivateError::MissingQueue(REQUEST));
        }
        self.set_interrupt(Some(Arc::clone(&interrupt)));
        let driver = Box::new(Driver {
            mem,
            interrupt,
            features,
            sizes: self.sizes,
            queues,
        });
        let answer = self.ask(|ack| ControllerMessage::Activate(driver, ack));
        answer.ok_or_else(|| io::Error::other("the SCSI controller has ended"))?;
        self.active = true;
        Ok(())
    }

    fn reset(&mut self) {
        if self.ask(ControllerMessage::Reset).is_none() {
            tracing::error!("the SCSI controller has ended");
        }
        self.active = false;
        self.sizes = Sizes::DEFAULT;
        self.set_interrupt(None);
    }

    fn quiesce(&mut self) -> Option<Vec<ActiveQueue>> {
        if !std::mem::take(&mut self.active) {
            return None;
        }
        self.ask(ControllerMessage::Quiesce)
    }

    fn save(&mut self) -> Result<ComponentState, SaveError> {
        let controller = self.ask(ControllerMessage::Save);
        let ended = || SaveError::Refused("the SCSI controller has ended".into());
        ComponentState::new(&ScsiState {
            cdb_size: self.sizes.cdb,
            sense_size: self.sizes.sense,
            controller: controller.ok_or_else(ended)??,
        })
    }

    fn restore(&mut self, state: &ComponentState, features: u64) -> Result<(), RestoreError> {
        let state: ScsiState = state.parse()?;
        let controller = Box::new(state.controller);
        let restored = self.ask(|ack| ControllerMessage::Restore(controller, features, ack));
        restored.ok_or_else(|| io::Error::other("the SCSI controller has ended"))??;
        self.sizes = Sizes {
            cdb: state.cdb_size,
            sense: state.sense_size,
        };
        Ok(())
    }
}
