//! The limit of a device on requests for which the kernel takes host-wide locks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use husk_devices::throttle::Throttle;

/// The limit. It outlives resets of the device, which would lift it otherwise.
#[derive(Clone, Debug)]
pub(crate) struct SharedThrottle(Arc<Mutex<Throttle>>);

impl SharedThrottle {
    /// A limit that has not been used.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(Throttle::new(Instant::now()))))
    }

    /// The limit, for a caller that waits by itself.
    pub fn lock(&self) -> MutexGuard<'_, Throttle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a request that could not wait. A driver that makes too many of them is held up, each time for a few
    /// milliseconds.
    pub fn charge(&self) {
        let now = Instant::now();
        let pause = {
            let mut throttle = self.lock();
            // What was earned comes first: a charge takes no more than there is.
            throttle.wait(now);
            throttle.charge();
            throttle.wait(now)
        };
        pause.into_iter().for_each(thread::sleep);
    }
}
