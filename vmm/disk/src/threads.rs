//! The engine for hosts where io_uring is switched off: a few threads with blocking calls.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::executor::{Call, Executor};

/// Calls that run at once.
const THREADS: usize = 4;

/// Bytes of a thread's stack; a call needs next to nothing.
const STACK: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    pushed: Vec<(u16, Call)>,
    running: usize,
}

/// Between the owner and its threads, and nobody else.
#[derive(Debug)]
struct Shared {
    file: Arc<File>,
    jobs: Mutex<Jobs>,
    wake: Condvar,
    done: Mutex<VecDeque<(u16, i32)>>,
    event: EventFd,
}

#[derive(Debug, Default)]
struct Jobs {
    queue: VecDeque<(u16, Call)>,
    stop: bool,
}

impl Threads {
    pub fn new(file: &Arc<File>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            file: Arc::clone(file),
            jobs: Mutex::default(),
            wake: Condvar::new(),
            done: Mutex::default(),
            event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        });
        // Made first, so that a thread that cannot be made ends those that could.
        let mut threads = Self {
            shared,
            threads: Vec::new(),
            pushed: Vec::new(),
            running: 0,
        };
        for _ in 0..THREADS {
            let shared = Arc::clone(&threads.shared);
            let thread = thread::Builder::new().name("disk-io".into()).stack_size(STACK);
            threads.threads.push(thread.spawn(move || shared.work())?);
        }
        Ok(threads)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        lock(&self.shared.jobs).stop = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Executor for Threads {
    unsafe fn push(&mut self, tag: u16, call: Call) {
        self.pushed.push((tag, call));
    }

    fn submit(&mut self) -> io::Result<()> {
        if !self.pushed.is_empty() {
            self.running += self.pushed.len();
            lock(&self.shared.jobs).queue.extend(self.pushed.drain(..));
            self.shared.wake.notify_all();
        }
        Ok(())
    }

    fn pop(&mut self) -> Option<(u16, i32)> {
        let done = lock(&self.shared.done).pop_front()?;
        self.running -= 1;
        Some(done)
    }

    fn running(&self) -> usize {
        self.running
    }

    fn event(&self) -> &EventFd {
        &self.shared.event
    }
}

impl Shared {
    fn work(&self) {
        while let Some((tag, call)) = self.next() {
            // SAFETY: whoever pushed the call keeps its memory until the result below is popped.
            let result = unsafe { perform(&self.file, call) };
            lock(&self.done).push_back((tag, result));
            // Fails only when the counter is about to overflow: then it is readable anyway.
            let _ = self.event.write(1);
        }
    }

    fn next(&self) -> Option<(u16, Call)> {
        let mut jobs = lock(&self.jobs);
        loop {
            if let Some(job) = jobs.queue.pop_front() {
                return Some(job);
            }
            if jobs.stop {
                return None;
            }
            jobs = self.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Carries out a call; the result is the kernel's, negative for an error number.
///
/// # Safety
/// The call's iovecs and the memory they name are valid.
unsafe fn perform(file: &File, call: Call) -> i32 {
    let fd = file.as_raw_fd();
    let result = match call {
        // SAFETY: by this function's contract.
        Call::Read { offset, vector } => unsafe {
            libc::preadv2(fd, vector.start, vector.count as i32, offset as i64, 0)
        },
        Call::Write {
            offset,
            vector,
            durable,
        } => {
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            // SAFETY: by this function's contract.
            unsafe { libc::pwritev2(fd, vector.start, vector.count as i32, offset as i64, flags) }
        }
        // SAFETY: takes no pointer.
        Call::Sync => unsafe { libc::fdatasync(fd) as isize },
        // SAFETY: takes no pointer.
        Call::Allocate { mode, offset, len } => unsafe {
            libc::fallocate(fd, mode, offset as i64, len as i64) as isize
        },
    };
    if result < 0 {
        -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
    } else {
        // At most 2 GiB less a page.
        result as i32
    }
}
