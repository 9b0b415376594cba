//! Virtio over PCI (virtio 1.2, section 4.1), modern only: no I/O BAR, no INTx, split queues.
//!
//! The driver's registers and the device are behind one lock, taken by vCPU threads and the control
//! thread. It is held while the device stops its workers; what workers call, [`Interrupt`], never takes it.
//! The device is active while the driver is ready, lets the function be bus master (which it stops doing
//! when it leaves for a new kernel) and the machine is not paused.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard};

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::QueueT;
use vm_memory::GuestAddressSpace;

use super::{Activation, ActiveQueue, VirtioDevice, VirtioInterrupt};
use crate::GuestMem;
use crate::doorbell::Doorbells;
use crate::msi::MsiAllocator;
use crate::pci::config::{ConfigError, ConfigSpace};
use crate::pci::{Bar, Msix, PciDevice};

mod common;
#[cfg(test)]
mod fake;
mod interrupt;
mod layout;
#[cfg(test)]
mod props;
mod rings;
mod state;
#[cfg(test)]
mod tests;

use common::{Common, Request};
use interrupt::Interrupt;
pub use interrupt::{NO_VECTOR, status};
pub use layout::{BAR_SIZE, MAX_QUEUES};
use layout::{Capabilities, Region};
use rings::Rings;
pub use state::{CommonState, QueueRegisters, RestoreError, RingState, State, VERSION};

/// Why a device cannot become a PCI function.
#[derive(Debug, thiserror::Error)]
pub enum NewError {
    /// It has too many queues, or one whose size is no power of two from 1 to 32768.
    #[error("virtio device cannot have these queues")]
    Queues,
    /// Its virtio device ID is above 63, or its configuration longer than 2048 bytes.
    #[error("virtio device cannot be shown over PCI")]
    Shape,
    /// Its configuration space cannot be laid out.
    #[error("configuration space: {0}")]
    Config(#[from] ConfigError),
    /// Interrupt vectors ran out.
    #[error("interrupt vectors: {0}")]
    Vectors(#[from] std::io::Error),
}

/// A virtio device as a PCI function.
pub struct VirtioPci {
    interrupt: Arc<Interrupt>,
    capabilities: Capabilities,
    config_size: u16,
    inner: Mutex<Inner>,
}

impl std::fmt::Debug for VirtioPci {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtioPci")
            .field("interrupt", &self.interrupt)
            .finish_non_exhaustive()
    }
}

struct Inner {
    interrupt: Arc<Interrupt>,
    capabilities: Capabilities,
    space: ConfigSpace,
    common: Common,
    device: Box<dyn VirtioDevice>,
    /// From the moment the driver is ready until a reset or a failure.
    rings: Option<Rings>,
    mem: GuestMem,
    doorbells: Arc<dyn Doorbells>,
    /// Where the BAR answers.
    placed: Option<u64>,
    quiesced: bool,
    paused: Option<State>,
    /// The device panicked in its reset: it is not to be used until a reset succeeds.
    broken: bool,
}

impl VirtioPci {
    /// Makes `device` a function whose BAR is at `bar_address` (a multiple of [`BAR_SIZE`]) until the guest
    /// moves it. It needs one vector per queue and one for configuration changes.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        mem: GuestMem,
        msi: &dyn MsiAllocator,
        doorbells: Arc<dyn Doorbells>,
        bar_address: u64,
    ) -> Result<Arc<Self>, NewError> {
        let sizes = device.queue_max_sizes();
        let valid = |size: &u16| size.is_power_of_two();
        if sizes.len() > MAX_QUEUES || !sizes.iter().all(valid) {
            return Err(NewError::Queues);
        }
        let (device_type, config_size) = (device.device_type(), device.config_size());
        let device_type = u16::try_from(device_type)
            .ok()
            .filter(|id| *id < 64)
            .ok_or(NewError::Shape)?;
        if u64::from(config_size) > layout::DEVICE_MAX {
            return Err(NewError::Shape);
        }
        let msix = Msix::new(sizes.len() as u16 + 1, msi)?;
        let class = device.pci_class();
        let (space, capabilities) =
            layout::config_space(device_type, class, config_size, sizes.len(), &msix, bar_address)?;
        let interrupt = Arc::new(Interrupt::new(device.name(), msix, sizes.len()));
        let inner = Inner {
            interrupt: interrupt.clone(),
            capabilities,
            space,
            common: Common::new(device.features(), sizes),
            device,
            rings: None,
            mem,
            doorbells,
            placed: None,
            quiesced: false,
            paused: None,
            broken: false,
        };
        Ok(Arc::new(Self {
            interrupt,
            capabilities,
            config_size,
            inner: Mutex::new(inner),
        }))
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        self.interrupt.name()
    }

    /// Stops the device until [`VirtioPci::resume`]. The vCPUs are stopped before. Idempotent.
    pub fn pause(&self) {
        let state = self.quiesce();
        self.inner().paused.get_or_insert(state);
    }

    /// Undoes [`VirtioPci::pause`], by restoring the state it kept. If that fails the device needs a reset.
    pub fn resume(&self) {
        let paused = self.inner().paused.take();
        match paused {
            Some(state) => {
                if let Err(error) = self.restore(&state) {
                    self.interrupt.needs_reset(&error.to_string());
                }
            }
            None => self.inner().run(),
        }
    }

    /// Stops the device without losing a request and returns all there is to know about the function.
    /// It stays stopped until [`VirtioPci::restore`] or [`VirtioPci::resume`].
    pub fn quiesce(&self) -> State {
        let mut inner = self.inner();
        inner.quiesced = true;
        inner.settle();
        inner.save()
    }

    /// Takes a state of [`VirtioPci::quiesce`], of this function or of one made alike, and goes on from
    /// there. Nothing changes on an error. BARs may have moved: [`crate::pci::Root::refresh`] follows.
    pub fn restore(&self, state: &State) -> Result<(), RestoreError> {
        self.inner().restore(state)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Drop for VirtioPci {
    fn drop(&mut self) {
        self.inner().reset_device();
    }
}

impl PciDevice for VirtioPci {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        let access = {
            let inner = self.inner();
            self.capabilities.access(&inner.space, offset, data.len())
        };
        if let Some((target, width)) = access {
            let mut value = [0; 4];
            self.bar_read(layout::BAR, target, &mut value[..width]);
            self.inner()
                .space
                .write(self.capabilities.access_data(), &value[..width]);
        }
        self.inner().space.read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) {
        let access = {
            let mut inner = self.inner();
            inner.space.write(offset, data);
            let control = self.capabilities.msix_control(&inner.space);
            self.interrupt.msix().set_control(control);
            inner.settle();
            self.capabilities
                .access(&inner.space, offset, data.len())
                .map(|(target, width)| {
                    let mut value = [0; 4];
                    inner.space.read(self.capabilities.access_data(), &mut value);
                    (target, width, value)
                })
        };
        if let Some((target, width, value)) = access {
            self.bar_write(layout::BAR, target, &value[..width]);
        }
    }

    fn bars(&self) -> Vec<Bar> {
        self.inner().space.decoded()
    }

    fn bar_read(&self, _: u8, offset: u64, data: &mut [u8]) {
        let Some((region, offset)) = layout::region(offset) else {
            return data.fill(0xff);
        };
        data.fill(0);
        match region {
            Region::Common => self.inner().common.read(offset, data, &self.interrupt),
            Region::Isr if offset == 0 => {
                if let Some(byte) = data.first_mut() {
                    *byte = self.interrupt.take_isr();
                }
            }
            Region::Device => {
                if let Some(data) = self.inside_config(offset, data.len()).map(|len| &mut data[..len]) {
                    self.inner().call("read of its configuration", |device| {
                        device.read_config(offset, data)
                    });
                }
            }
            Region::Table => self.interrupt.msix().read_table(offset, data),
            Region::Pending => self.interrupt.msix().read_pending(offset, data),
            Region::Isr | Region::Notify => {}
        }
    }

    fn bar_write(&self, _: u8, offset: u64, data: &[u8]) {
        let Some((region, offset)) = layout::region(offset) else {
            return;
        };
        match region {
            Region::Common => self.inner().write_common(offset, data),
            Region::Device => {
                if let Some(data) = self.inside_config(offset, data.len()).map(|len| &data[..len]) {
                    self.inner().call("write to its configuration", |device| {
                        device.write_config(offset, data)
                    });
                }
            }
            Region::Notify => {
                if let (Some(queue), Some(rings)) = (layout::notified(offset), &self.inner().rings) {
                    rings.kick(queue);
                }
            }
            Region::Table => self.interrupt.msix().write_table(offset, data),
            Region::Isr | Region::Pending => {}
        }
    }

    fn bar_placed(&self, _: u8, address: Option<u64>) {
        let mut inner = self.inner();
        inner.placed = address;
        inner.follow_bar();
    }

    fn reset(&self) {
        let mut inner = self.inner();
        inner.reset_device();
        inner.paused = None;
        inner.space.reset();
        self.interrupt.msix().reset();
    }
}

impl VirtioPci {
    /// How many of `len` bytes at `offset` lie in device configuration; none if not even the first does.
    fn inside_config(&self, offset: u64, len: usize) -> Option<usize> {
        let rest = u64::from(self.config_size)
            .checked_sub(offset)
            .filter(|rest| *rest != 0)?;
        Some(len.min(usize::try_from(rest).unwrap_or(len)))
    }
}

impl Inner {
    /// Calls the device; a panic costs the device, not the caller.
    fn call<R>(&mut self, what: &str, f: impl FnOnce(&mut dyn VirtioDevice) -> R) -> Option<R> {
        let result = catch_unwind(AssertUnwindSafe(|| f(&mut *self.device)));
        if result.is_err() {
            self.interrupt.needs_reset(&format!("panicked in {what}"));
        }
        result.ok()
    }

    fn write_common(&mut self, offset: u64, data: &[u8]) {
        match self.common.write(offset, data, &self.interrupt) {
            Some(Request::Reset) => self.reset_device(),
            Some(Request::Start) => self.start(),
            None => {}
        }
    }

    /// The driver is ready.
    fn start(&mut self) {
        if self.broken || self.interrupt.has(status::NEEDS_RESET) {
            return self.interrupt.needs_reset("it failed before and was not reset");
        }
        match Rings::new(self.common.rings()) {
            Ok(rings) => {
                self.rings = Some(rings);
                self.settle();
            }
            Err(error) => self.interrupt.needs_reset(&format!("kick events: {error}")),
        }
    }

    fn run(&mut self) {
        self.quiesced = false;
        self.settle();
    }

    /// Gives the queues to the device or takes them from it, as everything together wants it.
    fn settle(&mut self) {
        let active = self.rings.as_ref().map(|rings| !rings.is_held());
        let wanted = self.space.is_master() && !self.quiesced;
        let outcome = match active {
            Some(false) if wanted => self.activate(),
            Some(true) if !wanted => self.hold(),
            _ => Ok(()),
        };
        if let Err(reason) = outcome {
            self.drop_rings();
            self.interrupt.needs_reset(&reason);
        }
    }

    fn activate(&mut self) -> Result<(), String> {
        let Some(rings) = &mut self.rings else {
            return Ok(());
        };
        let taken = rings.take().map_err(|e| format!("kick events: {e}"))?;
        let features = self.common.features();
        let event_idx = features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
        let memory = self.mem.memory();
        let mut queues = Vec::with_capacity(taken.len());
        for (ring, kick) in taken {
            let index = ring.index;
            let max_size = self
                .common
                .max_size(index)
                .ok_or_else(|| format!("no queue {index}"))?;
            let queue = ring
                .queue(max_size, event_idx)
                .map_err(|e| format!("queue {index}: {e}"))?;
            if !queue.is_valid(&*memory) {
                return Err(format!("queue {index} is not in guest memory"));
            }
            queues.push(ActiveQueue { index, queue, kick });
        }
        let interrupt: Arc<dyn VirtioInterrupt> = self.interrupt.clone();
        let activation = Activation {
            mem: self.mem.clone(),
            features,
            queues,
            interrupt,
        };
        match self.call("activation", |device| device.activate(activation)) {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(format!("activation: {error}")),
            None => return Err("activation failed".into()),
        }
        self.follow_bar();
        if let Some(rings) = &self.rings {
            rings.kick_all();
        }
        Ok(())
    }

    fn hold(&mut self) -> Result<(), String> {
        let queues = self.call("quiescing", |device| device.quiesce()).flatten();
        let queues = queues.ok_or("it did not return its queues")?;
        let mut states: Vec<_> = queues.iter().map(|q| RingState::of(q.index, &q.queue)).collect();
        states.sort_by_key(|ring| ring.index);
        match &mut self.rings {
            Some(rings) if rings.fit(&states) => rings.hold(states),
            _ => return Err("it returned other queues".into()),
        }
        Ok(())
    }

    fn follow_bar(&mut self) {
        if let Some(rings) = &mut self.rings {
            rings.follow(self.placed, &*self.doorbells);
        }
    }

    fn drop_rings(&mut self) {
        if let Some(mut rings) = self.rings.take() {
            rings.follow(None, &*self.doorbells);
        }
    }

    /// Section 2.4: the driver wrote 0 to device status.
    fn reset_device(&mut self) {
        self.drop_rings();
        self.broken = self.call("reset", |device| device.reset()).is_none();
        self.common.reset();
        self.interrupt.reset();
    }

    fn save(&self) -> State {
        let vectors = 0..self.common.state().queues.len();
        State {
            version: VERSION,
            device_type: self.device.device_type(),
            config_space: self.space.save(),
            status: self.interrupt.status(),
            isr: self.interrupt.isr(),
            generation: self.interrupt.generation(),
            common: self.common.state().clone(),
            config_vector: self.interrupt.config_vector(),
            queue_vectors: vectors.map(|queue| self.interrupt.queue_vector(queue)).collect(),
            msix: self.interrupt.msix().save(),
            rings: self
                .rings
                .as_ref()
                .and_then(|rings| rings.held().map(<[RingState]>::to_vec)),
        }
    }

    fn restore(&mut self, state: &State) -> Result<(), RestoreError> {
        if state.version != VERSION {
            return Err(RestoreError::Version(state.version));
        }
        if state.device_type != self.device.device_type() {
            return Err(RestoreError::Mismatch("device types"));
        }
        self.common
            .check(&state.common, state.status)
            .map_err(RestoreError::Mismatch)?;
        if state.msix.len() != usize::from(self.interrupt.msix().len()) {
            return Err(RestoreError::Mismatch("vectors"));
        }
        if self.rings.as_ref().is_some_and(|rings| !rings.is_held()) {
            return Err(RestoreError::Running);
        }
        let states = state.rings.as_deref();
        if !states.unwrap_or_default().is_sorted_by(|a, b| a.index < b.index) {
            return Err(RestoreError::Mismatch("rings"));
        }
        // Kick events and doorbells stay if the queues do, so that no notification is lost on the way.
        match (&mut self.rings, states) {
            (Some(rings), Some(states)) if rings.fit(states) => rings.hold(states.to_vec()),
            (_, states) => {
                let rings = states.map(|states| Rings::new(states.to_vec())).transpose()?;
                self.drop_rings();
                self.rings = rings;
            }
        }
        self.space.load(&state.config_space);
        self.common.load(&state.common);
        self.interrupt
            .msix()
            .load(self.capabilities.msix_control(&self.space), &state.msix);
        self.interrupt.map_config(state.config_vector);
        for (queue, vector) in state.queue_vectors.iter().enumerate() {
            self.interrupt.map_queue(queue, *vector);
        }
        self.interrupt.load(state.status, state.isr, state.generation);
        self.run();
        Ok(())
    }
}
