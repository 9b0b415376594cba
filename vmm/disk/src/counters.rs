//! Counters of a disk's completed requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::operation::OperationKind;

/// Successful requests to a disk since it was opened. Discards and requests that only write zeroes do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskCounters {
    /// Reads.
    pub reads: u64,
    /// Bytes of these reads.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes of these writes.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
}

/// The counters of one engine, written by its thread only, and so aligned to a cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct EngineTotals {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    flushes: AtomicU64,
}

impl EngineTotals {
    /// Counts a successful request of `len` bytes. Only the engine may call this.
    pub fn count(&self, kind: OperationKind, len: u64) {
        let (requests, bytes) = match kind {
            OperationKind::Read => (&self.reads, Some(&self.read_bytes)),
            OperationKind::Write => (&self.writes, Some(&self.written_bytes)),
            OperationKind::Flush => (&self.flushes, None),
            OperationKind::Discard | OperationKind::Zero { .. } => return,
        };
        // One writer: no locked instruction is needed.
        let add = |total: &AtomicU64, more: u64| {
            total.store(
                total.load(Ordering::Relaxed).wrapping_add(more),
                Ordering::Relaxed,
            );
        };
        add(requests, 1);
        if let Some(bytes) = bytes {
            add(bytes, len);
        }
    }

    fn add_to(&self, sum: &mut DiskCounters) {
        sum.reads += self.reads.load(Ordering::Relaxed);
        sum.read_bytes += self.read_bytes.load(Ordering::Relaxed);
        sum.writes += self.writes.load(Ordering::Relaxed);
        sum.written_bytes += self.written_bytes.load(Ordering::Relaxed);
        sum.flushes += self.flushes.load(Ordering::Relaxed);
    }
}

/// The counters of all engines that serve or served a disk. Locked when one is attached or detached, and by readers.
#[derive(Debug, Default)]
pub(crate) struct DiskTotals(Mutex<Engines>);

#[derive(Debug, Default)]
struct Engines {
    present: Vec<Arc<EngineTotals>>,
    gone: DiskCounters,
}

impl DiskTotals {
    /// Counters for one more engine.
    pub fn join(&self) -> Arc<EngineTotals> {
        let totals = Arc::<EngineTotals>::default();
        self.with(|engines| engines.present.push(Arc::clone(&totals)));
        totals
    }

    /// Detaches an engine: its counts stay in the sum.
    pub fn leave(&self, totals: &Arc<EngineTotals>) {
        self.with(|engines| {
            totals.add_to(&mut engines.gone);
            engines.present.retain(|present| !Arc::ptr_eq(present, totals));
        });
    }

    /// The sum.
    pub fn read(&self) -> DiskCounters {
        self.with(|engines| {
            let mut sum = engines.gone;
            for totals in &engines.present {
                totals.add_to(&mut sum);
            }
            sum
        })
    }

    fn with<T>(&self, work: impl FnOnce(&mut Engines) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
