//! The I/O backend over io_uring.
//!
//! The ring is created disabled and restricted before it is enabled: it allows six operations on registered files and
//! updates of the file table. An attacker who controls the process cannot lift the restrictions.
//!
//! The calling thread executes some calls itself, without the ring: see [`SynchronousCalls`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{IoUring, Submitter, opcode, squeue};

use crate::io_backend::{IoBackend, IoCall};
use crate::synchronous_calls::SynchronousCalls;

/// Retries of a submission for which the kernel has no memory, a millisecond apart.
const RETRIES: u32 = 1000;

/// IORING_REGISTER_FILES_UPDATE
const REGISTER_FILES_UPDATE: u8 = 6;

/// Entry of the file table without a file.
const NO_FILE: RawFd = -1;

pub(crate) struct UringBackend {
    ring: IoUring,
    max_files: u32,
    /// Calls in the ring.
    running: usize,
    synchronous: SynchronousCalls,
    /// Results of calls that the calling thread executed.
    executed: VecDeque<(u16, i32)>,
}

impl std::fmt::Debug for UringBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringBackend")
            .field("running", &self.running)
            .finish_non_exhaustive()
    }
}

impl UringBackend {
    /// A ring for `entries` calls at once, with a table for `max_files` files, all empty. An empty entry takes 8 to 16
    /// bytes in the kernel.
    pub fn new(entries: u16, max_files: u32) -> io::Result<Self> {
        let ring = build(entries)?;
        let submitter = ring.submitter();
        let max_files = max_files.min(open_files());
        register_files_table(&submitter, max_files)?;
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
            Restriction::register_op(REGISTER_FILES_UPDATE),
        ])?;
        submitter.register_enable_rings()?;
        Ok(Self {
            ring,
            max_files,
            running: 0,
            synchronous: SynchronousCalls::default(),
            executed: VecDeque::new(),
        })
    }

    fn set_file(&self, slot: u32, fd: RawFd) -> io::Result<()> {
        match self.ring.submitter().register_files_update(slot, &[fd])? {
            1 => Ok(()),
            _ => Err(io::ErrorKind::Other.into()),
        }
    }
}

fn build(entries: u16) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    // As many completions as calls can be in flight.
    builder.dontfork().setup_r_disabled().setup_cqsize(entries.into());
    // Not SINGLE_ISSUER, nor DEFER_TASKRUN, which needs it: the ring outlives the worker that uses it and moves to the
    // next one. COOP_TASKRUN alone ends the worker's wait when a call completes.
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

/// Registers a table of empty entries.
fn register_files_table(submitter: &Submitter<'_>, max_files: u32) -> io::Result<()> {
    match submitter.register_files_sparse(max_files) {
        // Linux before 5.19.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            submitter.register_files(&vec![NO_FILE; max_files as usize])
        }
        other => other,
    }
}

/// Maximum open files of this process, which also bounds the file table.
fn open_files() -> u32 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes one rlimit, for which there is room.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } < 0 {
        return u32::MAX;
    }
    limit.rlim_cur.try_into().unwrap_or(u32::MAX)
}

fn entry(file: Fixed, call: IoCall) -> squeue::Entry {
    match call {
        IoCall::Read { offset, vector } if vector.count == 1 => {
            // SAFETY: the caller of `push` guarantees the iovec.
            let buffer = unsafe { *vector.start };
            opcode::Read::new(file, buffer.iov_base.cast(), clamp(buffer.iov_len))
                .offset(offset)
                .build()
        }
        IoCall::Read { offset, vector } => opcode::Readv::new(file, vector.start, vector.count)
            .offset(offset)
            .build(),
        IoCall::Write {
            offset,
            vector,
            durable,
        } => {
            let flags = if durable { libc::RWF_DSYNC } else { 0 };
            if vector.count == 1 {
                // SAFETY: the caller of `push` guarantees the iovec.
                let buffer = unsafe { *vector.start };
                opcode::Write::new(file, buffer.iov_base.cast(), clamp(buffer.iov_len))
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            } else {
                opcode::Writev::new(file, vector.start, vector.count)
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            }
        }
        IoCall::Sync => opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build(),
        IoCall::Allocate {
            mode, offset, len, ..
        } => opcode::Fallocate::new(file, len)
            .offset(offset)
            .mode(mode)
            .build(),
    }
}

/// Maximum bytes of one call; the engine submits the rest in another call.
fn clamp(len: usize) -> u32 {
    len.min(1 << 30) as u32
}

impl IoBackend for UringBackend {
    fn max_files(&self) -> u32 {
        self.max_files
    }

    fn attach(&mut self, slot: u32, file: BorrowedFd<'_>) -> io::Result<()> {
        self.set_file(slot, file.as_raw_fd())?;
        self.synchronous.attach(slot, file);
        Ok(())
    }

    fn detach(&mut self, slot: u32) -> io::Result<()> {
        self.set_file(slot, NO_FILE)?;
        self.synchronous.detach(slot);
        Ok(())
    }

    fn set_disks(&mut self, disks: usize) {
        self.synchronous.set_disks(disks);
    }

    unsafe fn push(&mut self, tag: u16, slot: u32, call: IoCall) {
        // SAFETY: the caller guarantees the call's memory until it pops the result.
        if let Some(result) = unsafe { self.synchronous.execute(slot, call) } {
            return self.executed.push_back((tag, result));
        }
        let entry = entry(Fixed(slot), call).user_data(tag.into());
        // SAFETY: the caller keeps the memory that the entry points to. There is room: a tag has at most one call in
        // flight, and the ring has an entry for every tag.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        debug_assert!(pushed.is_ok());
    }

    fn submit(&mut self) -> io::Result<bool> {
        let (mut tries, mut any) = (0, false);
        loop {
            let queued = self.ring.submission().len();
            if queued == 0 {
                return Ok(any);
            }
            match self.ring.submit() {
                Ok(taken) => {
                    self.running += taken;
                    any = true;
                }
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
        if let Some(executed) = self.executed.pop_front() {
            return Some(executed);
        }
        let done = self.ring.completion().next()?;
        self.running -= 1;
        Some((done.user_data() as u16, done.result()))
    }

    fn running(&self) -> usize {
        self.running + self.executed.len()
    }

    /// The ring itself: readable while it holds completions, so there is no eventfd to write and read.
    fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring stays open as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::io_backend::IovecList;

    fn run(ring: &mut UringBackend, entry: &squeue::Entry) -> i32 {
        // SAFETY: the entries of these tests name no memory.
        unsafe { ring.ring.submission().push(entry) }.unwrap();
        ring.ring.submit_and_wait(1).unwrap();
        ring.ring.completion().next().unwrap().result()
    }

    #[test]
    fn the_ring_allows_only_listed_operations() {
        let file = tempfile::tempfile().unwrap();
        let mut ring = UringBackend::new(4, 2).unwrap();
        ring.attach(1, file.as_fd()).unwrap();
        const FILE: Fixed = Fixed(1);
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
        let refused = ring
            .ring
            .submitter()
            .register_eventfd(file.as_raw_fd())
            .unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
        ring.detach(1).unwrap();
        assert_eq!(run(&mut ring, &opcode::Fsync::new(FILE).build()), -libc::EBADF);
        let nowhere = Fixed(2);
        assert_eq!(run(&mut ring, &opcode::Fsync::new(nowhere).build()), -libc::EBADF);
    }

    #[test]
    fn a_synchronous_call_needs_no_submission() {
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"disk".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the descriptor is new and owned by nobody else.
        let memory: std::fs::File = unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) };
        let mut ring = UringBackend::new(4, 1).unwrap();
        ring.attach(0, memory.as_fd()).unwrap();
        let buffer = libc::iovec {
            iov_base: b"content!".as_ptr().cast_mut().cast(),
            iov_len: 8,
        };
        let vector = IovecList {
            start: &raw const buffer,
            count: 1,
        };
        let write = IoCall::Write {
            offset: 4,
            vector,
            durable: false,
        };
        // SAFETY: the file and the buffer outlive the ring's use.
        unsafe { ring.push(7, 0, write) };
        assert_eq!((ring.running(), ring.ring.submission().is_empty()), (1, true));
        assert_eq!(ring.pop(), Some((7, 8)));
        assert_eq!(ring.running(), 0);
        // SAFETY: takes no memory.
        unsafe { ring.push(8, 0, IoCall::Sync) };
        assert_eq!(ring.pop(), Some((8, 0)));
        let allocate = IoCall::Allocate {
            mode: libc::FALLOC_FL_KEEP_SIZE,
            offset: 0,
            len: 8,
            hint: false,
        };
        // SAFETY: takes no memory.
        unsafe { ring.push(9, 0, allocate) };
        assert_eq!((ring.pop(), ring.ring.submission().len()), (None, 1));
    }
}
