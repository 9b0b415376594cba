//! What passed through a device, counted.

use std::sync::atomic::{AtomicU64, Ordering};

/// Frames of one direction since the device was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames passed on.
    pub packets: u64,
    /// Their bytes, without headers of virtio.
    pub bytes: u64,
    /// Frames thrown away: too long for the driver's buffers, or while the link was down.
    pub dropped: u64,
    /// Frames thrown away because something was wrong with them, the driver's buffers or the tap.
    pub errors: u64,
}

/// What [`Counters`] are read from. Workers add to it once for many frames.
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

    /// Moves `counters` here.
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
