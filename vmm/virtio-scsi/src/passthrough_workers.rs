//! The threads that execute commands of a passthrough device with blocking calls.
//!
//! A command that a thread has started cannot be cancelled: it ends when the device completes it, or when the kernel
//! aborts it after its timeout. A queued command can be cancelled.

use std::collections::VecDeque;
use std::fmt::{self, Debug, Formatter};
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use husk_devices::GuestMemMmap;
use husk_devices::virtio::chain::Segment;
use husk_seccomp::{ThreadRole, install};
use vmm_sys_util::eventfd::EventFd;

use crate::memory;
use crate::target::{
    DeliveryFailure, Extent, PassthroughCommand, PassthroughData, PassthroughDevice, PassthroughResult,
    Transfer,
};

/// Maximum threads of a device, and so its maximum commands in flight.
const MAX_THREADS: usize = 16;

/// Alignment of data in bytes, so that the host's kernel need not copy it.
const ALIGNMENT: usize = 4096;

/// A command for the device.
pub(crate) struct Job {
    pub tag: u16,
    pub command_out: PassthroughCommand,
    pub mem: Arc<GuestMemMmap>,
    /// The initiator's buffer for the command's transfer.
    pub segments: Vec<Segment>,
}

/// A job that has ended.
pub(crate) struct FinishedJob {
    pub tag: u16,
    pub end: JobResult,
}

/// The result of a job.
pub(crate) enum JobResult {
    /// The device's answer, or the reason why there is none.
    Completed(Result<PassthroughResult, DeliveryFailure>),
    /// The initiator's buffer is not in guest memory.
    BadBuffer,
    /// The answer to an [extent query](crate::extent_query).
    Extent(io::Result<Extent>),
}

/// Sends results from the threads to the controller.
#[derive(Clone)]
pub(crate) struct CompletionSender {
    sender: Sender<FinishedJob>,
    wakeup: Arc<EventFd>,
}

impl CompletionSender {
    /// A sender that signals `wakeup`, and the receiver.
    pub fn new(wakeup: EventFd) -> (Self, Receiver<FinishedJob>) {
        let (sender, receiver) = channel();
        let wakeup = Arc::new(wakeup);
        (Self { sender, wakeup }, receiver)
    }

    pub fn finish(&self, finished: FinishedJob) {
        if self.sender.send(finished).is_ok() {
            // Fails only if the counter would overflow. Then it is readable anyway.
            let _ = self.wakeup.write(1);
        }
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    idle: usize,
    /// Threads that execute a command.
    busy: usize,
    stop: bool,
}

struct Shared {
    device: Arc<dyn PassthroughDevice>,
    queue: Mutex<Queue>,
    wake: Condvar,
    completions: CompletionSender,
}

/// The threads of a device: as many as it had commands in flight at once.
pub(crate) struct PassthroughWorkers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Debug for PassthroughWorkers {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("PassthroughWorkers")
            .field("device", &self.shared.device)
            .field("threads", &self.threads.len())
            .finish_non_exhaustive()
    }
}

impl PassthroughWorkers {
    /// Starts the first thread for `device`.
    pub fn new(device: Arc<dyn PassthroughDevice>, completions: CompletionSender) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            device,
            queue: Mutex::default(),
            wake: Condvar::new(),
            completions,
        });
        let mut workers = Self {
            shared,
            threads: Vec::new(),
        };
        workers.start()?;
        Ok(workers)
    }

    fn start(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new().name("lun-io".into()).stack_size(256 << 10);
        self.threads.push(thread.spawn(move || {
            install(ThreadRole::Lun);
            shared.work();
        })?);
        Ok(())
    }

    /// Queues a job. Starts a thread if none is idle.
    pub fn submit(&mut self, job: Job) {
        let mut queue = self.shared.lock();
        queue.jobs.push_back(job);
        let short = queue.jobs.len() > queue.idle;
        drop(queue);
        self.shared.wake.notify_one();
        if short
            && self.threads.len() < MAX_THREADS
            && let Err(error) = self.start()
        {
            tracing::debug!(%error, "cannot start another thread for a passthrough device");
        }
    }

    /// Cancels a job that no thread has started. Returns true if there was one with this tag.
    pub fn cancel_queued(&self, tag: u16) -> bool {
        let mut queue = self.shared.lock();
        let at = queue.jobs.iter().position(|job| job.tag == tag);
        at.and_then(|at| queue.jobs.remove(at)).is_some()
    }
}

impl Drop for PassthroughWorkers {
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        queue.stop = true;
        queue.jobs.clear();
        let idle = queue.busy == 0;
        drop(queue);
        self.shared.wake.notify_all();
        // A thread that waits for its device may do so for minutes. It owns all that it needs.
        for thread in self.threads.drain(..).filter(|_| idle) {
            let _ = thread.join();
        }
    }
}

/// Sends the result of a job, even if the job panics.
struct CompletionGuard<'s> {
    shared: &'s Shared,
    tag: u16,
    end: Option<JobResult>,
}

impl Drop for CompletionGuard<'_> {
    fn drop(&mut self) {
        let end = self
            .end
            .take()
            .unwrap_or(JobResult::Completed(Err(DeliveryFailure::Other)));
        self.shared.lock().busy -= 1;
        self.shared.completions.finish(FinishedJob { tag: self.tag, end });
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut bounce = BounceBuffer::default();
        while let Some(job) = self.next() {
            let mut ending = CompletionGuard {
                shared: self,
                tag: job.tag,
                end: None,
            };
            ending.end = Some(execute_job(&*self.device, &job, &mut bounce));
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queue = self.lock();
        loop {
            if queue.stop {
                return None;
            }
            if let Some(job) = queue.jobs.pop_front() {
                queue.busy += 1;
                return Some(job);
            }
            queue.idle += 1;
            queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }
}

/// A thread's data buffer. The device never gets guest memory: the guest could change it while the device reads it, and
/// the kernel's writes would not be marked dirty.
#[derive(Default)]
struct BounceBuffer(Vec<u8>);

impl BounceBuffer {
    fn bytes(&mut self, len: usize) -> &mut [u8] {
        if self.0.len() < len + ALIGNMENT {
            self.0 = vec![0; len + ALIGNMENT];
        }
        // At most the alignment. The fallback covers a pointer without an address.
        let start = self.0.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        &mut self.0[start..][..len]
    }
}

fn execute_job(device: &dyn PassthroughDevice, job: &Job, bounce: &mut BounceBuffer) -> JobResult {
    let command_out = &job.command_out;
    let (cdb, timeout) = (command_out.cdb(), command_out.timeout);
    let plain = |outcome| PassthroughResult {
        outcome,
        ..PassthroughResult::default()
    };
    let (Transfer::In(len) | Transfer::Out(len) | Transfer::Internal(len)) = command_out.transfer else {
        return JobResult::Completed(device.execute(cdb, PassthroughData::None, timeout).map(plain));
    };
    let bytes = bounce.bytes(len as usize);
    if matches!(command_out.transfer, Transfer::Out(_)) {
        if memory::read(&job.mem, &job.segments, 0, bytes).is_err() {
            return JobResult::BadBuffer;
        }
        return JobResult::Completed(
            device
                .execute(cdb, PassthroughData::Out(bytes), timeout)
                .map(plain),
        );
    }
    // A device may report bytes that it did not send. They read as zeroes.
    bytes.fill(0);
    let outcome = match device.execute(cdb, PassthroughData::In(bytes), timeout) {
        Ok(outcome) => outcome,
        Err(failure) => return JobResult::Completed(Err(failure)),
    };
    let sent = &bytes[..bytes.len().saturating_sub(outcome.residual)];
    if matches!(command_out.transfer, Transfer::Internal(_)) {
        let data = sent.to_vec();
        return JobResult::Completed(Ok(PassthroughResult { outcome, data }));
    }
    match memory::write(&job.mem, &job.segments, 0, sent) {
        Ok(_) => JobResult::Completed(Ok(plain(outcome))),
        Err(_) => JobResult::BadBuffer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_aligned_and_memory_is_kept() {
        let mut bounce = BounceBuffer::default();
        for len in [1, 512, 4096, 100, 512 << 10, 8192] {
            let bytes = bounce.bytes(len);
            assert_eq!((bytes.len(), bytes.as_ptr().addr() % ALIGNMENT), (len, 0));
        }
        assert_eq!(bounce.0.len(), (512 << 10) + ALIGNMENT);
    }
}
