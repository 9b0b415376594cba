//! Requests that write zeroes piece by piece, because `fallocate` does not do it for their file. They take long, so
//! others pass them between two pieces.

use std::io;

use super::Engine;
use super::requests::BOUNCES;

impl Engine {
    /// Suspends the requests that write zeroes without `fallocate` at their next piece, until
    /// [`Engine::resume_zeroing`], so that a pause need not wait for gigabytes of zeroes.
    pub fn suspend_zeroing(&mut self) {
        self.zeroing_suspended = true;
        // Those that wait for a bounce buffer do not begin.
        self.ended_one = true;
        self.unblock();
    }

    /// Continues the suspended requests. Call [`Engine::kick`] afterwards.
    pub fn resume_zeroing(&mut self) {
        self.zeroing_suspended = false;
        for tag in std::mem::take(&mut self.suspended) {
            self.advance(tag);
        }
        self.unblock();
    }

    /// Makes requests that write zeroes without `fallocate` complete with `ECANCELED` at their next piece. Tags of
    /// other requests, or of none, mean nothing.
    pub fn abandon_zeroing(&mut self, tags: &[u16]) {
        for tag in tags {
            if let Some(request) = self.requests.get_mut(usize::from(*tag)) {
                request.abandoned = true;
            }
        }
        for tag in std::mem::take(&mut self.suspended) {
            self.advance(tag);
        }
        self.ended_one = true;
        self.unblock();
    }

    /// True if the next step of a request begins a piece of zeroes.
    pub(super) fn begins_zeroes(&self, tag: u16) -> bool {
        let request = &self.requests[usize::from(tag)];
        let attached = self.disks[request.slot as usize].attached.as_ref();
        attached.is_some_and(|attached| request.operation.begins_zeroes(&attached.traits))
    }

    /// True if a request may write a piece of zeroes now. Else it was ended, or waits, without a bounce buffer.
    pub(super) fn may_zero(&mut self, tag: u16) -> bool {
        let request = &mut self.requests[usize::from(tag)];
        if request.abandoned {
            self.end(tag, Err(io::Error::from_raw_os_error(libc::ECANCELED)));
            return false;
        }
        let others = self.bounces == BOUNCES && !self.waiting.is_empty();
        if !self.zeroing_suspended && !others {
            return true;
        }
        if request.operation.release_bounce_buffer() {
            self.bounces -= 1;
            self.ended_one = true;
        }
        if self.zeroing_suspended {
            self.suspended.push(tag);
        } else {
            self.waiting.push_back(tag);
        }
        false
    }
}
