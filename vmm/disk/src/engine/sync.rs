//! Syncs: one at a time for each disk, for all requests that wait for it.

use super::{AttachedDisk, Engine};
use crate::geometry::Align;
use crate::io_backend::IoCall;

impl AttachedDisk {
    /// True if the call of this tag is the running sync.
    pub(super) fn is_sync(&self, tag: u16) -> bool {
        self.syncs.running.first() == Some(&tag)
    }

    /// Records what a failed sync means for later ones: the page cache may have dropped earlier writes, and a second
    /// fdatasync would succeed without them.
    fn note_loss(&self, errno: i32) {
        let disk = self.image.disk();
        let geometry = disk.geometry();
        let lost = disk.backend().sync_failed() || geometry.late_errors;
        if geometry.write_cache && geometry.align == Align::NONE && lost {
            disk.set_flush_error(errno);
        }
    }

    /// Records the error of a write that may be one of earlier writes to the page cache: the next fdatasync would
    /// succeed without them.
    pub(super) fn note_late_error(&self, errno: i32) {
        let disk = self.image.disk();
        let geometry = disk.geometry();
        let late = matches!(errno, libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EIO);
        if late && geometry.late_errors && geometry.align == Align::NONE {
            if geometry.write_cache {
                disk.set_flush_error(errno);
            }
            disk.syncs().note_loss(errno);
        }
    }
}

impl Engine {
    /// Has a request take part in the next sync of its disk.
    pub(super) fn sync(&mut self, tag: u16) {
        let slot = self.requests[usize::from(tag)].slot;
        if let Some(attached) = &mut self.disks[slot as usize].attached {
            attached.syncs.waiting.push(tag);
            self.start_sync(slot);
        }
    }

    /// Starts a sync if requests wait for one and none is running.
    fn start_sync(&mut self, slot: u32) {
        let Some(attached) = &mut self.disks[slot as usize].attached else {
            return;
        };
        let syncs = &mut attached.syncs;
        let Some(&tag) = syncs.waiting.first().filter(|_| syncs.running.is_empty()) else {
            return;
        };
        std::mem::swap(&mut syncs.running, &mut syncs.waiting);
        syncs.number = attached.image.disk().syncs().begin();
        // SAFETY: a sync uses no memory, and the file stays attached while a request to it is in flight.
        unsafe { self.backends.push(tag, slot, IoCall::Sync) };
    }

    /// Takes the result of the running sync, which is the call of `tag`.
    pub(super) fn synced(&mut self, tag: u16, result: i32) {
        self.end_sync(tag, result);
        let slot = self.requests[usize::from(tag)].slot;
        let Some(attached) = &mut self.disks[slot as usize].attached else {
            return;
        };
        let mut served = std::mem::take(&mut attached.syncs.running);
        let syncs = attached.image.disk().syncs();
        let next = syncs.next();
        if result >= 0 {
            served.retain(|tag| {
                let request = &mut self.requests[usize::from(*tag)];
                // A sync of another engine that ran beside it may have taken its error. It is synced again until that
                // one's result is known.
                let counts = syncs.ended_before(*request.synced.get_or_insert(next));
                match counts {
                    true => request.operation.call_done(result, &mut attached.traits),
                    false => attached.syncs.waiting.push(*tag),
                }
                counts
            });
        }
        self.start_sync(slot);
        for tag in served {
            self.advance(tag);
        }
    }

    /// Ends the syncs of an engine that is broken and never sent them, so that other engines do not wait for them.
    pub(super) fn end_unsent_syncs(&self) {
        for attached in self.disks.iter().filter_map(|slot| slot.attached.as_ref()) {
            if !attached.syncs.running.is_empty() {
                attached.image.disk().syncs().end(attached.syncs.number, 0);
            }
        }
    }

    /// Records the result of a call if it is a sync. If it failed, so did the requests that it serves.
    pub(super) fn end_sync(&mut self, tag: u16, result: i32) {
        let slot = self.requests[usize::from(tag)].slot;
        let attached = self.disks[slot as usize].attached.as_mut();
        let Some(attached) = attached.filter(|attached| attached.is_sync(tag)) else {
            return;
        };
        let mut errno = 0;
        if result < 0 {
            for tag in &attached.syncs.running {
                let operation = &mut self.requests[usize::from(*tag)].operation;
                operation.call_done(result, &mut attached.traits);
                if operation.failed_to_sync() {
                    errno = -result;
                }
            }
        }
        // Before it counts as ended, so that other engines find the loss.
        if errno != 0 {
            attached.note_loss(errno);
        }
        attached.image.disk().syncs().end(attached.syncs.number, errno);
    }
}
