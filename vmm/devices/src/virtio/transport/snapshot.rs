//! Saves and restores a virtio function.

use super::function::VirtioFunction;
use super::interrupt::{NO_VECTOR, status};
use super::rings::QueueRings;
use super::state::{RingState, TransportState};
use crate::component::{RestoreError, SaveError, check};

/// Bits of the ISR status.
const ISR: u8 = 0b11;

impl VirtioFunction {
    /// The complete state of a paused function.
    pub fn save(&mut self) -> Result<TransportState, SaveError> {
        if !self.paused {
            return Err(SaveError::Running);
        }
        if self.broken {
            return Err(SaveError::Refused("the device panicked in its reset".into()));
        }
        let device = self.call("saving", |device| device.save());
        let device = device.map_err(SaveError::Refused)??;
        let vectors = 0..self.common.state().queues.len();
        let rings = self.rings.as_ref().and_then(|rings| rings.parked());
        Ok(TransportState {
            device_type: self.device.device_type(),
            config_space: self.space.save(),
            status: self.interrupt.status(),
            isr: self.interrupt.isr(),
            generation: self.interrupt.generation(),
            common: self.common.state().clone(),
            config_vector: self.interrupt.config_vector(),
            queue_vectors: vectors.map(|queue| self.interrupt.queue_vector(queue)).collect(),
            msix: self.interrupt.msix().save(),
            rings: rings.map(<[RingState]>::to_vec),
            device,
        })
    }

    /// Restores a state and leaves the function paused.
    pub fn restore(&mut self, state: &TransportState) -> Result<(), RestoreError> {
        if self.rings.as_ref().is_some_and(|rings| !rings.is_parked()) {
            return Err(RestoreError::Running);
        }
        self.check(state)?;
        let rings = state.rings.clone().map(QueueRings::new).transpose()?;
        let negotiated = state.status & status::FEATURES_OK != 0;
        let features = if negotiated { state.common.features() } else { 0 };
        self.call("restoring", |device| device.restore(&state.device, features))
            .map_err(|reason| RestoreError::field("device", reason))??;
        (self.paused, self.restored) = (true, true);
        self.drop_rings();
        self.rings = rings;
        self.space.load(&state.config_space);
        self.common.load(&state.common);
        let control = self.capabilities.msix_control(&self.space);
        self.interrupt.msix().load(control, &state.msix);
        self.interrupt.map_config(state.config_vector);
        for (queue, vector) in state.queue_vectors.iter().enumerate() {
            self.interrupt.map_queue(queue, *vector);
        }
        self.interrupt.load(state.status, state.isr, state.generation);
        self.update_ioeventfds();
        Ok(())
    }

    /// Checks a state against the function as it was built. Whether the rings lie in guest memory is checked when the
    /// device is activated, as with those that a driver sets up.
    fn check(&self, state: &TransportState) -> Result<(), RestoreError> {
        let same = state.device_type == self.device.device_type();
        check(same, "device_type", "is that of another device")?;
        self.space.check(&state.config_space, "config_space")?;
        self.common.check(&state.common, state.status)?;
        check(state.isr & !ISR == 0, "isr", "has an unknown bit")?;
        let vectors = self.interrupt.msix().len();
        let same = state.msix.len() == usize::from(vectors);
        check(same, "msix", "has another number of vectors")?;
        let exists = |vector: &u16| *vector < vectors || *vector == NO_VECTOR;
        check(exists(&state.config_vector), "config_vector", "does not exist")?;
        let same = state.queue_vectors.len() == state.common.queues.len();
        check(same, "queue_vectors", "has another number of queues")?;
        let all = state.queue_vectors.iter().all(exists);
        check(all, "queue_vectors", "has a vector that does not exist")?;
        let ready = state.status & status::DRIVER_OK != 0;
        let works = state.status & status::NEEDS_RESET == 0;
        let Some(rings) = &state.rings else {
            return check(!ready || !works, "rings", "are missing of a driver that is ready");
        };
        check(ready, "rings", "belong to a driver that is not ready")?;
        // A ring is as the driver set it up, except for the positions.
        let unused = rings.iter().map(|ring| RingState {
            next_avail: 0,
            next_used: 0,
            ..*ring
        });
        let same = unused.eq(state.common.rings());
        check(same, "rings", "are not those of the enabled queues")
    }
}
