//! Where threads leave the results of calls for the one engine that made them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Tags of calls that are done, and what they returned.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    done: Mutex<VecDeque<(u16, i32)>>,
    /// Signalled when `done` is not empty any more.
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
            // Fails only when the counter is about to overflow: then it is readable anyway.
            let _ = self.event.write(1);
        }
    }

    /// The next of `taken`, which is filled up with all there is when it is empty.
    pub fn pop(&self, taken: &mut VecDeque<(u16, i32)>) -> Option<(u16, i32)> {
        if taken.is_empty() {
            let mut done = lock(&self.done);
            if done.is_empty() {
                return None;
            }
            std::mem::swap(&mut *done, taken);
            // Under the lock: what is done later signals again.
            let _ = self.event.read();
        }
        taken.pop_front()
    }

    /// Readable while there is something to take.
    pub fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the event is open as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }
}

/// A lock whose holders leave what it guards whole when they panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
