//! The threads that wait for a device of the host, and nobody else does.
//!
//! There is no taking back what the host's kernel has: a command ends when the device has done it, or when its time
//! limit had the kernel abort it. What no thread has begun can be recalled.

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
    DeliveryFailure, PassthroughCommand, PassthroughData, PassthroughDevice, PassthroughResult, Transfer,
};

/// Most threads of a device, and so commands that it has at once.
const MAX_THREADS: usize = 16;

/// Where data is aligned to, in bytes, so that the host's kernel need not copy it.
const ALIGNMENT: usize = 4096;

/// A command for the device.
pub(crate) struct Job {
    pub tag: u16,
    pub command_out: PassthroughCommand,
    pub mem: Arc<GuestMemMmap>,
    /// The initiator's buffer that the passage speaks of.
    pub segments: Vec<Segment>,
}

/// A job that has ended.
pub(crate) struct FinishedJob {
    pub tag: u16,
    pub end: JobResult,
}

/// How.
pub(crate) enum JobResult {
    /// With the device's answer, or without.
    Completed(Result<PassthroughResult, DeliveryFailure>),
    /// The initiator's buffer is not in memory.
    BadBuffer,
}

/// Where threads say that they are finished.
#[derive(Clone)]
pub(crate) struct CompletionSender {
    sender: Sender<FinishedJob>,
    wakeup: Arc<EventFd>,
}

impl CompletionSender {
    /// An outlet that rings `wakeup`, and its other end.
    pub fn new(wakeup: EventFd) -> (Self, Receiver<FinishedJob>) {
        let (sender, receiver) = channel();
        let wakeup = Arc::new(wakeup);
        (Self { sender, wakeup }, receiver)
    }

    fn finish(&self, finished: FinishedJob) {
        if self.sender.send(finished).is_ok() {
            // Fails only when the counter is about to overflow: then it is readable anyway.
            let _ = self.wakeup.write(1);
        }
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    idle: usize,
    /// Threads that are with the device.
    busy: usize,
    stop: bool,
}

struct Shared {
    device: Arc<dyn PassthroughDevice>,
    queue: Mutex<Queue>,
    wake: Condvar,
    completions: CompletionSender,
}

/// A device's threads, as many as there were ever commands at once.
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
    /// The first thread for `device`.
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

    /// Has a job done, at once if a thread is free.
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
            tracing::debug!(%error, "no further thread for a LUN");
        }
    }

    /// Takes a job back that no thread has begun. Returns whether there was one of that tag.
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
        // One that waits for its device may do so for minutes, and has all it needs.
        for thread in self.threads.drain(..).filter(|_| idle) {
            let _ = thread.join();
        }
    }
}

/// Tells the end of a job, also of one that panics.
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

/// A thread's memory for data: what the guest can change while the device reads it, or the kernel writes where nobody
/// notes it, is not what a device is given.
#[derive(Default)]
struct BounceBuffer(Vec<u8>);

impl BounceBuffer {
    fn bytes(&mut self, len: usize) -> &mut [u8] {
        if self.0.len() < len + ALIGNMENT {
            self.0 = vec![0; len + ALIGNMENT];
        }
        // At most the alignment; the fallback is what a pointer without an address would give.
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
    // What a device says it sent it may not have: then it is nothing.
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
    match memory::write(&job.mem, &job.segments, sent) {
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
