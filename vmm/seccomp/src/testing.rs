//! Threads without filters, for fuzzers: they start thousands of threads in a second, and a thread that panics has to
//! write the input to a file.

use std::sync::atomic::{AtomicBool, Ordering};

static OFF: AtomicBool = AtomicBool::new(false);

/// From now on, [`install`](crate::install) does nothing in this process.
pub fn turn_filters_off() {
    OFF.store(true, Ordering::Relaxed);
}

pub(crate) fn are_filters_off() -> bool {
    OFF.load(Ordering::Relaxed)
}
