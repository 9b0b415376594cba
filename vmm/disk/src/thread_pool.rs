//! A pool of threads for calls that block.

use std::collections::VecDeque;
use std::fmt::{self, Debug, Formatter};
use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use husk_seccomp::{ThreadRole, install};

use crate::completion_queue::lock;

/// Threads that take jobs from one queue, oldest first. Dropping it waits until all jobs are done.
pub(crate) struct ThreadPool<J> {
    shared: Arc<Shared<J>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared<J> {
    jobs: Mutex<Jobs<J>>,
    wake: Condvar,
}

struct Jobs<J> {
    queue: VecDeque<J>,
    stop: bool,
}

impl<J> Debug for ThreadPool<J> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let threads = self.threads.len();
        f.debug_struct("ThreadPool")
            .field("threads", &threads)
            .finish_non_exhaustive()
    }
}

impl<J: Send + 'static> ThreadPool<J> {
    /// Starts `count` threads called `name`, each with `stack` bytes of stack and the seccomp filter of `role`, that
    /// run `work`.
    pub fn new(
        role: ThreadRole,
        name: &str,
        (count, stack): (usize, usize),
        work: impl Fn(J) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let jobs = Mutex::new(Jobs {
            queue: VecDeque::new(),
            stop: false,
        });
        let wake = Condvar::new();
        // Created first: if a thread cannot be started, dropping it ends the others.
        let mut pool = Self {
            shared: Arc::new(Shared { jobs, wake }),
            threads: Vec::new(),
        };
        let work = Arc::new(work);
        for _ in 0..count {
            let (shared, work) = (Arc::clone(&pool.shared), Arc::clone(&work));
            let thread = thread::Builder::new().name(name.into()).stack_size(stack);
            pool.threads.push(thread.spawn(move || {
                install(role);
                while let Some(job) = shared.next() {
                    work(job);
                }
            })?);
        }
        Ok(pool)
    }

    /// Queues jobs.
    pub fn push(&self, jobs: impl ExactSizeIterator<Item = J>) {
        let count = jobs.len().min(self.threads.len());
        lock(&self.shared.jobs).queue.extend(jobs);
        (0..count).for_each(|_| self.shared.wake.notify_one());
    }
}

impl<J> Drop for ThreadPool<J> {
    fn drop(&mut self) {
        lock(&self.shared.jobs).stop = true;
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl<J> Shared<J> {
    fn next(&self) -> Option<J> {
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn queued_jobs_finish_before_the_pool_ends() {
        let (sender, done) = mpsc::channel();
        let pool = ThreadPool::new(ThreadRole::DiskIo, "t", (3, 64 << 10), move |job: u32| {
            sender.send(job).unwrap()
        })
        .unwrap();
        pool.push(0..100);
        drop(pool);
        let mut done: Vec<u32> = done.iter().collect();
        done.sort_unstable();
        assert_eq!(done, (0..100).collect::<Vec<u32>>());
    }
}
