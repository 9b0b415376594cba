//! The engine over io_uring.
//!
//! The ring is created disabled and confined before it is enabled: it can do six operations on one registered
//! file and nothing else, ever, whatever somebody who took over the process writes into it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{IoUring, opcode, squeue};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::executor::{Call, Executor};

/// How often a submission that the kernel has no memory for is tried again, a millisecond apart.
const RETRIES: u32 = 1000;

const FILE: Fixed = Fixed(0);

pub(crate) struct Uring {
    ring: IoUring,
    event: EventFd,
    running: usize,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("running", &self.running)
            .finish_non_exhaustive()
    }
}

impl Uring {
    /// A ring for `entries` calls on `file`.
    pub fn new(file: &File, entries: u16) -> io::Result<Self> {
        let ring = build(entries)?;
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let submitter = ring.submitter();
        submitter.register_files(&[file.as_raw_fd()])?;
        submitter.register_eventfd(event.as_raw_fd())?;
        let fixed_file = Flags::FIXED_FILE.bits();
        submitter.register_restrictions(&mut [
            Restriction::sqe_op(opcode::Read::CODE),
            Restriction::sqe_op(opcode::Readv::CODE),
            Restriction::sqe_op(opcode::Write::CODE),
            Restriction::sqe_op(opcode::Writev::CODE),
            Restriction::sqe_op(opcode::Fsync::CODE),
            Restriction::sqe_op(opcode::Fallocate::CODE),
            Restriction::sqe_flags_allowed(fixed_file),
            Restriction::sqe_flags_required(fixed_file),
        ])?;
        submitter.register_enable_rings()?;
        Ok(Self {
            ring,
            event,
            running: 0,
        })
    }
}

fn build(entries: u16) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.dontfork().setup_r_disabled();
    // Not SINGLE_ISSUER: the ring outlives the worker that uses it, and follows it into the next one.
    let plain = builder.clone();
    match builder
        .setup_submit_all()
        .setup_coop_taskrun()
        .build(entries.into())
    {
        // Linux before 5.19.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => plain.build(entries.into()),
        other => other,
    }
}

fn entry(call: Call) -> squeue::Entry {
    match call {
        Call::Read { offset, vector } if vector.count == 1 => {
            // SAFETY: the caller of `push` vouches for the iovec.
            let buffer = unsafe { *vector.start };
            opcode::Read::new(FILE, buffer.iov_base.cast(), clamp(buffer.iov_len))
                .offset(offset)
                .build()
        }
        Call::Read { offset, vector } => opcode::Readv::new(FILE, vector.start, vector.count)
            .offset(offset)
            .build(),
        Call::Write {
            offset,
            vector,
            durable,
        } => {
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            if vector.count == 1 {
                // SAFETY: the caller of `push` vouches for the iovec.
                let buffer = unsafe { *vector.start };
                opcode::Write::new(FILE, buffer.iov_base.cast(), clamp(buffer.iov_len))
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            } else {
                opcode::Writev::new(FILE, vector.start, vector.count)
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            }
        }
        Call::Sync => opcode::Fsync::new(FILE).flags(FsyncFlags::DATASYNC).build(),
        Call::Allocate { mode, offset, len } => opcode::Fallocate::new(FILE, len)
            .offset(offset)
            .mode(mode)
            .build(),
    }
}

/// The kernel moves at most this much in one call; what is left is another call's.
fn clamp(len: usize) -> u32 {
    len.min(1 << 30) as u32
}

impl Executor for Uring {
    unsafe fn push(&mut self, tag: u16, call: Call) {
        let entry = entry(call).user_data(tag.into());
        // SAFETY: the caller keeps the memory the entry points at. There is room: a tag has one call out
        // at most, and the ring has an entry for every tag.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        debug_assert!(pushed.is_ok());
    }

    fn submit(&mut self) -> io::Result<()> {
        let mut tries = 0;
        loop {
            let queued = self.ring.submission().len();
            if queued == 0 {
                return Ok(());
            }
            match self.ring.submit() {
                Ok(taken) => self.running += taken,
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN | libc::EBUSY) if tries < RETRIES => {
                        tries += 1;
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    _ => return Err(e),
                },
            }
        }
    }

    fn pop(&mut self) -> Option<(u16, i32)> {
        let done = self.ring.completion().next()?;
        self.running -= 1;
        Some((done.user_data() as u16, done.result()))
    }

    fn running(&self) -> usize {
        self.running
    }

    fn event(&self) -> &EventFd {
        &self.event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(ring: &mut Uring, entry: &squeue::Entry) -> i32 {
        // SAFETY: the entries of these tests name no memory.
        unsafe { ring.ring.submission().push(entry) }.unwrap();
        ring.ring.submit_and_wait(1).unwrap();
        ring.ring.completion().next().unwrap().result()
    }

    #[test]
    fn the_ring_does_what_it_is_for_and_nothing_else() {
        let file = tempfile::tempfile().unwrap();
        let mut ring = Uring::new(&file, 4).unwrap();
        assert_eq!(run(&mut ring, &opcode::Fsync::new(FILE).build()), 0);
        assert_eq!(
            run(&mut ring, &opcode::Nop::new().build()),
            -libc::EACCES,
            "an operation not listed"
        );
        let unregistered = io_uring::types::Fd(file.as_raw_fd());
        assert_eq!(
            run(&mut ring, &opcode::Fsync::new(unregistered).build()),
            -libc::EACCES
        );
        let asynchronous = opcode::Fsync::new(FILE)
            .build()
            .flags(Flags::FIXED_FILE | Flags::ASYNC);
        assert_eq!(run(&mut ring, &asynchronous), -libc::EACCES, "a flag not listed");
        let refused = ring.ring.submitter().unregister_files().unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
    }
}
