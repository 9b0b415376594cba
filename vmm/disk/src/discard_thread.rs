//! Discards of a block device.
//!
//! `fallocate` on a block device zeroes it, which some devices cannot do and others do by writing. io_uring discards
//! since Linux 6.12. So a thread of the device makes the ioctl. It starts when the device is opened, with the
//! privileges of the thread that opens it.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use husk_seccomp::ThreadRole;

use crate::completion_queue::CompletionQueue;
use crate::thread_pool::ThreadPool;

/// `_IO(0x12, 119)`
const BLKDISCARD: libc::Ioctl = 0x1277;

/// Bytes of the thread's stack; a call needs very little.
const STACK: usize = 64 << 10;

/// The thread of one device. Dropping it waits for its discards.
#[derive(Debug)]
pub(crate) struct DiscardThread {
    pool: ThreadPool<Job>,
    block: u64,
}

#[derive(Debug)]
struct Job {
    tag: u16,
    device: RawFd,
    /// First byte and length.
    range: [u64; 2],
    answer: Arc<CompletionQueue>,
}

impl DiscardThread {
    /// Starts the thread of a device with logical blocks of `block` bytes.
    pub fn new(block: u64) -> io::Result<Self> {
        let pool = ThreadPool::new(ThreadRole::Discard, "discard", (1, STACK), |job: Job| {
            job.answer.put(job.tag, discard(job.device, job.range));
        })?;
        Ok(Self { pool, block })
    }

    /// Bytes of a logical block: the kernel discards whole ones.
    pub fn block(&self) -> u64 {
        self.block
    }

    /// Starts a discard of `range`, first byte and length, on the open `device`. Its result goes to `answer`; the
    /// device stays open until then.
    pub fn start(&self, tag: u16, device: RawFd, range: [u64; 2], answer: &Arc<CompletionQueue>) {
        let answer = Arc::clone(answer);
        let job = Job {
            tag,
            device,
            range,
            answer,
        };
        self.pool.push([job].into_iter());
    }
}

fn discard(device: RawFd, range: [u64; 2]) -> i32 {
    // SAFETY: the kernel reads two u64, which is what `range` is.
    match unsafe { libc::ioctl(device, BLKDISCARD, &raw const range) } {
        0.. => 0,
        _ => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
    }
}
