//! The I/O backend for hosts without io_uring: a few threads with blocking calls.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use husk_seccomp::ThreadRole;

use crate::blocking_call::perform;
use crate::completion_queue::CompletionQueue;
use crate::io_backend::{IoBackend, IoCall};
use crate::thread_pool::ThreadPool;

/// Maximum calls that run at once.
const THREADS: usize = 4;

/// Bytes of a thread's stack; a call needs very little.
const STACK: usize = 64 << 10;

/// A call, the file it is on, and its tag.
type Job = (u16, RawFd, IoCall);

#[derive(Debug)]
pub(crate) struct ThreadBackend {
    pool: ThreadPool<Job>,
    completions: Arc<CompletionQueue>,
    /// Indexed by slot.
    files: Vec<RawFd>,
    max_files: u32,
    pushed: Vec<Job>,
    /// Results taken from the queue and not popped yet.
    done: VecDeque<(u16, i32)>,
    running: usize,
}

impl ThreadBackend {
    pub fn new(max_files: u32) -> io::Result<Self> {
        let completions = Arc::new(CompletionQueue::new()?);
        let results = Arc::clone(&completions);
        let pool = ThreadPool::new(
            ThreadRole::DiskIo,
            "disk-io",
            (THREADS, STACK),
            move |(tag, fd, call): Job| {
                // SAFETY: the caller of `push` keeps the call's file and memory until the result below is popped.
                let result = unsafe { perform(fd, call) };
                results.put(tag, result);
            },
        )?;
        Ok(Self {
            pool,
            completions,
            files: Vec::new(),
            max_files,
            pushed: Vec::new(),
            done: VecDeque::new(),
            running: 0,
        })
    }
}

impl IoBackend for ThreadBackend {
    fn max_files(&self) -> u32 {
        self.max_files
    }

    fn attach(&mut self, slot: u32, file: BorrowedFd<'_>) -> io::Result<()> {
        let slot = slot as usize;
        if self.files.len() <= slot {
            self.files.resize(slot + 1, -1);
        }
        self.files[slot] = file.as_raw_fd();
        Ok(())
    }

    fn detach(&mut self, slot: u32) -> io::Result<()> {
        self.files[slot as usize] = -1;
        Ok(())
    }

    fn set_disks(&mut self, _: usize) {}

    unsafe fn push(&mut self, tag: u16, slot: u32, call: IoCall) {
        self.pushed.push((tag, self.files[slot as usize], call));
    }

    fn submit(&mut self) -> io::Result<bool> {
        let count = self.pushed.len();
        if count > 0 {
            self.running += count;
            self.pool.push(self.pushed.drain(..));
        }
        Ok(count > 0)
    }

    fn pop(&mut self) -> Option<(u16, i32)> {
        let done = self.completions.pop(&mut self.done)?;
        self.running -= 1;
        Some(done)
    }

    fn running(&self) -> usize {
        self.running
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.completions.event()
    }
}
