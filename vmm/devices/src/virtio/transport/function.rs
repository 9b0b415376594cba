//! The state behind the transport's lock: the registers, the device, and the ownership of the queues.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::QueueT;
use vm_memory::GuestAddressSpace;

use super::common::{CommonConfig, StatusChange};
use super::interrupt::{TransportInterrupt, status};
use super::layout::Capabilities;
use super::rings::QueueRings;
use super::state::RingState;
use crate::GuestMem;
use crate::ioeventfd::IoEventFds;
use crate::page_log::PageLog;
use crate::pci::ConfigSpace;
use crate::virtio::{Activation, ActiveQueue, VirtioDevice, VirtioInterrupt};

/// The registers and the device behind them.
pub(super) struct VirtioFunction {
    pub interrupt: Arc<TransportInterrupt>,
    pub capabilities: Capabilities,
    pub space: ConfigSpace,
    pub common: CommonConfig,
    pub device: Box<dyn VirtioDevice>,
    /// Set from DRIVER_OK until a reset or a failure.
    pub rings: Option<QueueRings>,
    mem: GuestMem,
    ioeventfds: Arc<dyn IoEventFds>,
    /// Guest-physical address of the BAR, if decoded.
    pub mapped: Option<u64>,
    pub paused: bool,
    /// It was restored and has not run since. What the host changed meanwhile reached no driver.
    pub restored: bool,
    /// The device panicked in its reset and is unusable until a reset succeeds.
    pub broken: bool,
}

impl VirtioFunction {
    pub fn new(
        interrupt: Arc<TransportInterrupt>,
        capabilities: Capabilities,
        space: ConfigSpace,
        common: CommonConfig,
        device: Box<dyn VirtioDevice>,
        mem: GuestMem,
        ioeventfds: Arc<dyn IoEventFds>,
    ) -> Self {
        Self {
            interrupt,
            capabilities,
            space,
            common,
            device,
            rings: None,
            mem,
            ioeventfds,
            mapped: None,
            paused: false,
            restored: false,
            broken: false,
        }
    }

    /// Calls the device and turns a panic into an error.
    pub fn call<R>(&mut self, what: &str, f: impl FnOnce(&mut dyn VirtioDevice) -> R) -> Result<R, String> {
        catch_unwind(AssertUnwindSafe(|| f(&mut *self.device)))
            .map_err(|_| format!("device panicked in {what}"))
    }

    pub fn read_config(&mut self, offset: u64, data: &mut [u8]) {
        if let Err(reason) = self.call("a read", |device| device.read_config(offset, data)) {
            self.interrupt.needs_reset(&reason);
        }
    }

    pub fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let Err(reason) = self.call("a write", |device| device.write_config(offset, data)) {
            self.interrupt.needs_reset(&reason);
        }
    }

    pub fn write_common(&mut self, offset: u64, data: &[u8]) {
        match self.common.write(offset, data, &self.interrupt) {
            Some(StatusChange::Reset) => self.reset_device(),
            Some(StatusChange::Start) => self.start(),
            None => {}
        }
    }

    /// Handles DRIVER_OK.
    fn start(&mut self) {
        if self.interrupt.has(status::NEEDS_RESET) {
            return self.interrupt.signal_config();
        }
        match QueueRings::new(self.common.rings()) {
            Ok(rings) => {
                self.rings = Some(rings);
                self.reconcile();
            }
            Err(error) => self.interrupt.needs_reset(&format!("kick events: {error}")),
        }
    }

    /// Stops or continues the device.
    pub fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
        self.reconcile();
        if !paused && std::mem::take(&mut self.restored) && self.interrupt.has(status::DRIVER_OK) {
            self.interrupt_all();
        }
    }

    /// Has the device mark pages from its next activation on.
    pub fn log_pages(&mut self, log: Option<&Arc<PageLog>>) {
        if let Err(reason) = self.call("log", |device| device.log_pages(log)) {
            self.interrupt.needs_reset(&reason);
        }
    }

    /// Interrupts the driver for its configuration and for each queue. The configuration may have changed since the
    /// save. A queue's interrupt may have been on its way then: KVM delivers some by a work queue of the host's kernel,
    /// and the saved local APIC lacks them. Drivers ignore those that tell them nothing.
    fn interrupt_all(&self) {
        self.interrupt.signal_config();
        for ring in self.common.rings() {
            self.interrupt.signal_queue(ring.index);
        }
    }

    /// Activates or quiesces the device according to bus mastering, pause state and device status.
    pub fn reconcile(&mut self) {
        let active = self.rings.as_ref().map(|rings| !rings.is_parked());
        let wanted = self.space.is_master() && !self.paused;
        let works = !self.interrupt.has(status::NEEDS_RESET);
        let outcome = match active {
            Some(false) if wanted && works => self.activate(),
            Some(true) if !wanted => self.park(),
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
        if self.broken {
            return Err("device panicked in its reset".into());
        }
        let taken = rings.unpark().map_err(|e| format!("kick events: {e}"))?;
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
        self.call("activation", |device| device.activate(activation))?
            .map_err(|e| format!("activation: {e}"))?;
        self.update_ioeventfds();
        if let Some(rings) = &self.rings {
            rings.kick_all();
        }
        Ok(())
    }

    fn park(&mut self) -> Result<(), String> {
        let queues = self.call("quiescing", |device| device.quiesce())?;
        let queues = queues.ok_or("device did not return its queues")?;
        let mut states: Vec<_> = queues.iter().map(|q| RingState::of(q.index, &q.queue)).collect();
        states.sort_by_key(|ring| ring.index);
        match &mut self.rings {
            Some(rings) if rings.matches(&states) => rings.park(states),
            _ => return Err("device returned other queues".into()),
        }
        Ok(())
    }

    pub fn update_ioeventfds(&mut self) {
        if let Some(rings) = &mut self.rings {
            rings.update_ioeventfds(self.mapped, &*self.ioeventfds);
        }
    }

    pub fn drop_rings(&mut self) {
        if let Some(mut rings) = self.rings.take() {
            rings.update_ioeventfds(None, &*self.ioeventfds);
        }
    }

    /// Section 2.4: the driver wrote 0 to device status.
    pub fn reset_device(&mut self) {
        self.drop_rings();
        self.broken = self.call("reset", |device| device.reset()).is_err();
        self.common.reset();
        self.interrupt.reset();
    }
}
