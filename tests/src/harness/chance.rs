//! Random numbers that a seed repeats.

use std::cell::Cell;
use std::time::Duration;

/// A random number generator (xorshift).
#[derive(Debug)]
pub struct Chance(Cell<u64>);

impl Chance {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Self {
        // It would return only zeros from 0.
        Self(Cell::new(seed | 1))
    }

    /// A number below `limit`, which is not 0.
    pub fn below(&self, limit: u64) -> u64 {
        let mut x = self.0.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.0.set(x);
        x % limit
    }

    /// A time up to `limit`, in whole milliseconds.
    pub fn moment(&self, limit: Duration) -> Duration {
        let limit = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX - 1);
        Duration::from_millis(self.below(limit + 1))
    }
}
