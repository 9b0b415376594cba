//! The syncs of a disk by all engines that serve it.
//!
//! The kernel reports an error of writeback once per open file, and all engines use the same one. So of two syncs at the
//! same time one fails, and the other succeeds although writes before it are lost. A sync is therefore reported as
//! successful only after all syncs that overlapped with it have ended without an error.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::completion_queue::lock;

/// The running syncs of a disk, and the failed ones.
#[derive(Debug, Default)]
pub(crate) struct Syncs {
    started: Mutex<Started>,
    /// Failed syncs so far. Read for each request, so without the lock.
    failed: AtomicU64,
    /// Error number of the last of them.
    errno: AtomicI32,
}

#[derive(Debug, Default)]
struct Started {
    /// Number of the next sync.
    next: u64,
    /// Numbers of those whose results are not known.
    running: Vec<u64>,
}

impl Syncs {
    /// Counts a sync that starts, and returns its number.
    pub fn begin(&self) -> u64 {
        let mut started = lock(&self.started);
        let number = started.next;
        started.next += 1;
        started.running.push(number);
        number
    }

    /// Counts the end of a sync. `errno` is 0 if it succeeded.
    pub fn end(&self, number: u64, errno: i32) {
        let mut started = lock(&self.started);
        started.running.retain(|running| *running != number);
        // The lock is held: a thread that sees the end of the sync also sees its error.
        if errno != 0 {
            self.note_loss(errno);
        }
    }

    /// Counts a loss of earlier writes as a failed sync.
    pub fn note_loss(&self, errno: i32) {
        self.errno.store(errno, Ordering::Relaxed);
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of the next sync. All that run now have lower ones.
    pub fn next(&self) -> u64 {
        lock(&self.started).next
    }

    /// True if all syncs with numbers below `next` have ended.
    pub fn ended_before(&self, next: u64) -> bool {
        lock(&self.started).running.iter().all(|running| *running >= next)
    }

    /// Number of syncs that have failed so far.
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Error number of the last one that failed.
    pub fn errno(&self) -> i32 {
        self.errno.load(Ordering::Relaxed)
    }
}
