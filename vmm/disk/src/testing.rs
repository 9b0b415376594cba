//! An engine in front of a kernel that does what a test says, for the tests of who uses one.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::Engine;
use crate::io_backend::{IoBackend, IoCall, IovecList};

/// A system call that an engine made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedCall {
    /// Of the request.
    pub tag: u16,
    /// The disk's place: the order of attachment, as long as none was detached.
    pub slot: u32,
    /// What.
    pub what: CallKind,
}

/// A system call. Offsets and lengths are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum CallKind {
    Read { offset: u64, len: u64 },
    Write { offset: u64, len: u64, durable: bool },
    Sync,
    Allocate { offset: u64, len: u64 },
}

impl CallKind {
    fn of(call: &IoCall) -> Self {
        let len = |vector: &IovecList| {
            // SAFETY: the engine vouches for the call's vector.
            let buffers = unsafe { std::slice::from_raw_parts(vector.start, vector.count as usize) };
            buffers.iter().map(|buffer| buffer.iov_len as u64).sum()
        };
        match call {
            IoCall::Read { offset, vector } => Self::Read {
                offset: *offset,
                len: len(vector),
            },
            IoCall::Write {
                offset,
                vector,
                durable,
            } => Self::Write {
                offset: *offset,
                len: len(vector),
                durable: *durable,
            },
            IoCall::Sync => Self::Sync,
            IoCall::Allocate { offset, len, .. } => Self::Allocate {
                offset: *offset,
                len: *len,
            },
        }
    }

    /// What the kernel returns for all of it.
    fn done(self) -> i32 {
        match self {
            Self::Read { len, .. } | Self::Write { len, .. } => len as i32,
            Self::Sync | Self::Allocate { .. } => 0,
        }
    }
}

/// The test's side.
#[derive(Clone, Debug)]
pub struct BackendScript(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    event: EventFd,
}

#[derive(Debug, Default)]
struct State {
    made: Vec<RecordedCall>,
    out: Vec<RecordedCall>,
    done: VecDeque<(u16, i32)>,
    broken: bool,
    dropped: bool,
}

/// The engine's side.
#[derive(Debug)]
struct Scripted {
    script: BackendScript,
    pushed: Vec<RecordedCall>,
    running: usize,
}

impl BackendScript {
    /// An engine, and what tells it when its calls are done.
    ///
    /// # Panics
    /// If there is no eventfd to be had.
    #[must_use]
    pub fn engine(depth: u16) -> (Engine, Self) {
        let script = Self(Arc::new(Shared {
            state: Mutex::default(),
            event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).expect("eventfd"),
        }));
        let scripted = Scripted {
            script: script.clone(),
            pushed: Vec::new(),
            running: 0,
        };
        (Engine::with_backend(Box::new(scripted), depth), script)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every call that was started so far.
    #[must_use]
    pub fn made(&self) -> Vec<RecordedCall> {
        self.state().made.clone()
    }

    /// Ends the call of a request: all of it is done, or it failed with an error number.
    ///
    /// # Panics
    /// If there is no such call.
    pub fn finish(&self, tag: u16, result: Result<(), i32>) {
        let mut state = self.state();
        let out = state.out.iter().position(|made| made.tag == tag);
        let made = state.out.swap_remove(out.expect("a call of that tag"));
        let result = result.map_or_else(|errno| -errno, |()| made.what.done());
        state.done.push_back((tag, result));
        self.0.event.write(1).expect("eventfd");
    }

    /// From now on no call can be started.
    pub fn break_down(&self) {
        self.state().broken = true;
    }

    /// Whether the engine is gone.
    #[must_use]
    pub fn is_dropped(&self) -> bool {
        self.state().dropped
    }
}

impl IoBackend for Scripted {
    fn max_files(&self) -> u32 {
        u32::MAX
    }

    fn attach(&mut self, _: u32, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn detach(&mut self, _: u32) -> io::Result<()> {
        Ok(())
    }

    unsafe fn push(&mut self, tag: u16, slot: u32, call: IoCall) {
        let what = CallKind::of(&call);
        self.pushed.push(RecordedCall { tag, slot, what });
    }

    fn submit(&mut self) -> io::Result<bool> {
        if self.pushed.is_empty() {
            return Ok(false);
        }
        let mut state = self.script.state();
        if state.broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        self.running += self.pushed.len();
        state.made.extend(&self.pushed);
        state.out.append(&mut self.pushed);
        Ok(true)
    }

    fn pop(&mut self) -> Option<(u16, i32)> {
        let mut state = self.script.state();
        let done = state.done.pop_front()?;
        if state.done.is_empty() {
            let _ = self.script.0.event.read();
        }
        self.running -= 1;
        Some(done)
    }

    fn running(&self) -> usize {
        self.running
    }

    fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the event is open as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.script.0.event.as_raw_fd()) }
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.script.state().dropped = true;
    }
}
