//! An engine whose system calls a test completes, for the tests of its users, and one whose calls to a qcow2 image are
//! made on the calling thread, for fuzzing.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::io_backend::{IoBackend, IoCall, IovecList};
use crate::qcow2::ImageContent;
use crate::{Disk, DiskId, DiskOptions, Engine, Extent, ImageFormat};

/// A system call that an engine started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedCall {
    /// Tag of the request.
    pub tag: u16,
    /// Slot of the disk: the order of attachment, as long as none was detached.
    pub slot: u32,
    /// The call.
    pub what: CallKind,
}

/// A system call without its buffers. Offsets and lengths are in bytes.
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
            // SAFETY: the engine guarantees the call's iovecs.
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

    /// Return value of the kernel for a complete call.
    fn done(self) -> i32 {
        match self {
            Self::Read { len, .. } | Self::Write { len, .. } => len as i32,
            Self::Sync | Self::Allocate { .. } => 0,
        }
    }
}

/// The test's handle to the calls of an engine.
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

/// The backend of the engine.
#[derive(Debug)]
struct Scripted {
    script: BackendScript,
    pushed: Vec<RecordedCall>,
    running: usize,
}

impl BackendScript {
    /// An engine and the handle that completes its calls.
    ///
    /// # Panics
    /// If the kernel has no eventfd.
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

    /// All calls that were started so far.
    #[must_use]
    pub fn made(&self) -> Vec<RecordedCall> {
        self.state().made.clone()
    }

    /// Completes the call of a request, wholly or with an error number.
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

    /// Makes every later submission fail.
    pub fn break_down(&self) {
        self.state().broken = true;
    }

    /// True if the engine was dropped.
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

    fn set_disks(&mut self, _: usize) {}

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
        // SAFETY: the event stays open as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.script.0.event.as_raw_fd()) }
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.script.state().dropped = true;
    }
}

/// An open qcow2 image without threads.
#[derive(Clone, Debug)]
pub struct InlineImage {
    content: Arc<ImageContent>,
    options: DiskOptions,
}

impl InlineImage {
    /// See [`Disk::open_qcow2`].
    ///
    /// # Errors
    /// As [`Disk::open_qcow2`].
    pub fn open(
        image: OwnedFd,
        base: Option<(OwnedFd, ImageFormat)>,
        options: DiskOptions,
    ) -> io::Result<Self> {
        let base = base.map(|(fd, format)| (File::from(fd), format));
        let content = Arc::new(ImageContent::open(File::from(image), base, options)?);
        Ok(Self { content, options })
    }

    /// Size of the disk in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.content.geometry().size
    }

    /// Fills `buf` from byte `offset` of the disk.
    ///
    /// # Errors
    /// `UnexpectedEof`: the range is not on the disk. Else the image is damaged, or the kernel's error.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match offset.checked_add(buf.len() as u64) {
            Some(end) if end <= self.size() => self.content.read(offset, buf),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// The extent that begins at byte `offset`, which is on the disk.
    ///
    /// # Errors
    /// The image is damaged, or the kernel's error.
    pub fn extent(&self, offset: u64) -> io::Result<Extent> {
        self.content.extent(offset)
    }

    /// An engine that serves the image on the thread that calls it.
    ///
    /// # Errors
    /// The kernel has no eventfd.
    pub fn engine(&self, depth: u16) -> io::Result<(Engine, DiskId)> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        // Readable for ever: no call takes longer than its submission.
        event.write(1)?;
        let inline = Inline {
            content: Arc::clone(&self.content),
            pushed: Vec::new(),
            done: VecDeque::new(),
            event,
        };
        let mut engine = Engine::with_backend(Box::new(inline), depth);
        let disk = Disk::without_image(self.content.geometry(), self.options.error_policy);
        let id = engine.attach(&disk)?;
        Ok((engine, id))
    }
}

/// The backend of that engine.
#[derive(Debug)]
struct Inline {
    content: Arc<ImageContent>,
    pushed: Vec<(u16, IoCall)>,
    done: VecDeque<(u16, i32)>,
    event: EventFd,
}

impl IoBackend for Inline {
    fn max_files(&self) -> u32 {
        1
    }

    fn attach(&mut self, _: u32, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn detach(&mut self, _: u32) -> io::Result<()> {
        Ok(())
    }

    fn set_disks(&mut self, _: usize) {}

    unsafe fn push(&mut self, tag: u16, _: u32, call: IoCall) {
        self.pushed.push((tag, call));
    }

    fn submit(&mut self) -> io::Result<bool> {
        let any = !self.pushed.is_empty();
        for (tag, call) in self.pushed.drain(..) {
            // SAFETY: by the contract of `push`, the call's memory is valid until its result is popped.
            let result = unsafe { self.content.perform(call) };
            self.done.push_back((tag, result));
        }
        Ok(any)
    }

    fn pop(&mut self) -> Option<(u16, i32)> {
        self.done.pop_front()
    }

    fn running(&self) -> usize {
        self.done.len()
    }

    fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the event stays open as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }
}
