//! Frame counters of a device.

use std::sync::atomic::{AtomicU64, Ordering};

/// Frames of one direction since the device was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames passed on.
    pub packets: u64,
    /// Bytes of these frames, without virtio headers.
    pub bytes: u64,
    /// Frames dropped because they were too long for the driver's buffers, or because the link was down.
    pub dropped: u64,
    /// Frames dropped because of an error of the frame, the driver's buffers or the tap.
    pub errors: u64,
}

/// The totals behind [`Counters`]. Workers add to them once per batch.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    packets: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
    errors: AtomicU64,
}

impl Totals {
    pub fn read(&self) -> Counters {
        Counters {
            packets: self.packets.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
            errors: self.errors.load(Ordering::Relaxed),
        }
    }

    /// Adds `counters` and resets them to 0.
    pub fn take(&self, counters: &mut Counters) {
        let Counters {
            packets,
            bytes,
            dropped,
            errors,
        } = std::mem::take(counters);
        for (total, more) in [
            (&self.packets, packets),
            (&self.bytes, bytes),
            (&self.dropped, dropped),
            (&self.errors, errors),
        ] {
            if more != 0 {
                total.fetch_add(more, Ordering::Relaxed);
            }
        }
    }
}
