//! Device worker threads: named, confined by seccomp, stopped by an event, joined on drop. Panics are caught and
//! reported.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{self, JoinHandle};

use husk_seccomp::{ThreadRole, install};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::sched_policy::use_batch_policy;

/// Error of a worker that panicked.
#[derive(Debug, thiserror::Error)]
#[error("worker {name} panicked: {message}")]
pub struct WorkerPanic {
    /// Thread name.
    pub name: String,
    /// Panic payload, if it was text.
    pub message: String,
}

/// A running worker thread whose loop returns a `T` once its stop event fires.
#[derive(Debug)]
pub struct Worker<T: Send + 'static> {
    name: String,
    stop: EventFd,
    thread: Option<JoinHandle<Result<T, String>>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts `body` on a thread called `name` (the kernel shows at most 15 bytes), confined by the seccomp filter of
    /// its role. `body` gets an eventfd that becomes readable when it should finish. `on_panic` runs on that thread
    /// if it panics, with the message.
    ///
    /// # Errors
    /// The kernel refuses an eventfd or a thread.
    pub fn spawn<F, P>(role: ThreadRole, name: &str, on_panic: P, body: F) -> io::Result<Self>
    where
        F: FnOnce(&EventFd) -> T + Send + 'static,
        P: FnOnce(&str) + Send + 'static,
    {
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let seen = stop.try_clone()?;
        let thread_name = name.to_owned();
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .stack_size(256 << 10)
            .spawn(move || {
                install(role);
                use_batch_policy();
                catch_unwind(AssertUnwindSafe(|| body(&seen))).map_err(|payload| {
                    let message = panic_text(payload.as_ref());
                    tracing::error!(worker = thread_name, message, "worker panicked");
                    on_panic(&message);
                    message
                })
            })?;
        Ok(Self {
            name: name.to_owned(),
            stop,
            thread: Some(thread),
        })
    }

    /// Asks the loop to finish, waits for it, and returns its result.
    ///
    /// # Errors
    /// The worker panicked.
    pub fn stop(mut self) -> Result<T, WorkerPanic> {
        self.join()
            .unwrap_or_else(|| Err("already joined".into()))
            .map_err(|message| WorkerPanic {
                name: std::mem::take(&mut self.name),
                message,
            })
    }

    fn join(&mut self) -> Option<Result<T, String>> {
        let thread = self.thread.take()?;
        // An eventfd write fails only when the counter is about to overflow: then it is readable anyway.
        let _ = self.stop.write(1);
        Some(
            thread
                .join()
                .unwrap_or_else(|payload| Err(panic_text(payload.as_ref()))),
        )
    }
}

impl<T: Send + 'static> Drop for Worker<T> {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::mpsc;

    use super::*;

    fn wait(stop: &EventFd) {
        let mut fd = libc::pollfd {
            fd: stop.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd, alive for the call, holding a descriptor that `stop` keeps open.
        assert_eq!(unsafe { libc::poll(&raw mut fd, 1, -1) }, 1);
    }

    /// A worker that does nothing, and its thread's number.
    fn idle() -> (Worker<()>, libc::pid_t) {
        let (tx, rx) = mpsc::channel();
        let body = move |stop: &EventFd| {
            // SAFETY: asks for the calling thread's number.
            tx.send(unsafe { libc::gettid() }).unwrap();
            wait(stop);
        };
        let worker = Worker::spawn(ThreadRole::Rng, "t", |_| {}, body).unwrap();
        (worker, rx.recv().unwrap())
    }

    #[test]
    fn stop_returns_the_loops_result() {
        let worker = Worker::spawn(
            ThreadRole::Rng,
            "t",
            |_| {},
            |stop| {
                wait(stop);
                42
            },
        )
        .unwrap();
        assert_eq!(worker.stop().unwrap(), 42);
    }

    #[test]
    fn a_worker_does_not_preempt_the_waking_thread() {
        let (worker, thread) = idle();
        // SAFETY: asks for the policy of a thread, which runs. It may not ask itself.
        let policy = unsafe { libc::sched_getscheduler(thread) };
        assert_eq!(policy, libc::SCHED_BATCH);
        worker.stop().unwrap();
    }

    #[test]
    fn a_worker_has_a_filter() {
        let (worker, thread) = idle();
        let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
        assert!(status.contains("\nSeccomp:\t2\n"), "{status}");
        worker.stop().unwrap();
    }

    #[test]
    fn a_panic_is_reported_and_does_not_spread() {
        let (tx, rx) = mpsc::channel();
        let worker: Worker<()> = Worker::spawn(
            ThreadRole::Rng,
            "t",
            move |m| tx.send(m.to_owned()).unwrap(),
            |_| panic!("boom"),
        )
        .unwrap();
        assert_eq!(rx.recv().unwrap(), "boom");
        assert_eq!(worker.stop().unwrap_err().to_string(), "worker t panicked: boom");
    }
}
