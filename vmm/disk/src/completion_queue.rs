//! A queue of results from threads to the engine that submitted the calls.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Tags and return values of finished calls.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    done: Mutex<VecDeque<(u16, i32)>>,
    /// Signalled when `done` becomes non-empty.
    event: EventFd,
}

impl CompletionQueue {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            done: Mutex::default(),
            event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        })
    }

    pub fn put(&self, tag: u16, result: i32) {
        let mut done = lock(&self.done);
        done.push_back((tag, result));
        if done.len() == 1 {
            // Fails only if the counter would overflow. Then it is readable anyway.
            let _ = self.event.write(1);
        }
    }

    /// Pops a result from `taken`. If that is empty, moves all results of the queue there first.
    pub fn pop(&self, taken: &mut VecDeque<(u16, i32)>) -> Option<(u16, i32)> {
        if taken.is_empty() {
            let mut done = lock(&self.done);
            if done.is_empty() {
                return None;
            }
            std::mem::swap(&mut *done, taken);
            // Under the lock, so that a later result signals again.
            let _ = self.event.read();
        }
        taken.pop_front()
    }

    /// Readable while the queue holds a result.
    pub fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the event stays open as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }
}

/// Locks a mutex whose content stays consistent if a holder panics.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
