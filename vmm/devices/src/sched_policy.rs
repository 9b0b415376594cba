//! Scheduling policy of worker threads: `SCHED_BATCH` (does not preempt the waking vCPU) or `SCHED_OTHER` (does).
//!
//! It matters where the worker shares a processor with the vCPU that wakes it. A driver that submits its requests one
//! by one is served best by a worker that waits: it finds many requests at once, with one exit and one interrupt for
//! all. A driver that submits one request at a time, or all its requests with one notification, is served best by a
//! worker that preempts: the guest would otherwise go idle first and be woken again. Where another processor is idle,
//! the thread runs there at once under either policy.

use std::io;

/// Passes whose requests are counted together.
const WINDOW: u32 = 32;

/// Windows under one policy, after which the other is tried for a window.
const WINDOWS: u32 = 32;

/// Scheduling policy of the calling thread: `SCHED_OTHER` as long as the thread finds about as many requests per pass
/// as under `SCHED_BATCH`, with which a [worker](crate::worker::Worker) starts.
#[derive(Debug, Default)]
pub struct SchedPolicy {
    preempts: bool,
    /// Passes and requests of the current window.
    passes: u32,
    requests: usize,
    /// Requests of the last window under `SCHED_BATCH`.
    batched: usize,
    /// Windows until the other policy is tried.
    windows_left: u32,
}

impl SchedPolicy {
    /// Records a pass over all queues that found `requests` requests, and switches the policy if due.
    pub fn record_pass(&mut self, requests: usize) {
        if self.should_switch(requests) {
            let policy = if self.preempts {
                libc::SCHED_OTHER
            } else {
                libc::SCHED_BATCH
            };
            schedule(policy);
        }
    }

    fn should_switch(&mut self, requests: usize) -> bool {
        if requests == 0 {
            return false;
        }
        self.passes += 1;
        self.requests += requests;
        if self.passes < WINDOW {
            return false;
        }
        self.passes = 0;
        let requests = std::mem::take(&mut self.requests);
        let preempted = self.preempts;
        if !preempted {
            self.batched = requests;
        }
        let loses = preempted && 4 * requests < 3 * self.batched;
        if self.windows_left > 0 && !loses {
            self.windows_left -= 1;
            return false;
        }
        self.preempts = !preempted;
        // After preempting for long, one window is enough to compare again.
        self.windows_left = if self.preempts || loses { WINDOWS } else { 0 };
        true
    }
}

/// Sets `SCHED_BATCH`: a vCPU that wakes the calling thread on its own processor keeps running, so that it submits
/// all its requests with one notification and gets one interrupt for them.
pub(crate) fn use_batch_policy() {
    schedule(libc::SCHED_BATCH);
}

fn schedule(policy: libc::c_int) {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: passes one sched_param, of the calling thread.
    if unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) } < 0 {
        let error = io::Error::last_os_error();
        tracing::debug!(%error, policy, "the worker keeps its scheduling policy");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn current_policy() -> libc::c_int {
        // SAFETY: asks for the calling thread's policy.
        unsafe { libc::sched_getscheduler(0) }
    }

    /// Windows under `SCHED_OTHER` of `passes` passes that find `waiting` requests under `SCHED_BATCH`, else
    /// `preempting`.
    fn preempting_windows(policy: &mut SchedPolicy, waiting: usize, preempting: usize, passes: u32) -> u32 {
        let preempts = (0..passes).filter(|_| {
            let preempts = policy.preempts;
            policy.should_switch(if preempts { preempting } else { waiting });
            preempts
        });
        preempts.count() as u32 / WINDOW
    }

    #[test]
    fn one_request_at_a_time_is_served_at_once() {
        use_batch_policy();
        let mut policy = SchedPolicy::default();
        for _ in 1..WINDOW {
            policy.record_pass(1);
            policy.record_pass(0);
            assert_eq!(current_policy(), libc::SCHED_BATCH);
        }
        policy.record_pass(1);
        assert_eq!(current_policy(), libc::SCHED_OTHER);
        for _ in 0..(WINDOWS + 1) * WINDOW {
            policy.record_pass(1);
        }
        assert_eq!(current_policy(), libc::SCHED_BATCH, "to compare again");
    }

    #[test]
    fn requests_of_one_notification_are_served_at_once() {
        for requests in [1, 2, 32] {
            let mut policy = SchedPolicy::default();
            let windows = preempting_windows(&mut policy, requests, requests, 100 * WINDOW);
            assert_eq!(
                windows, 97,
                "{requests} each: it looks at SCHED_BATCH from time to time"
            );
        }
    }

    #[test]
    fn requests_that_come_one_by_one_are_awaited() {
        let mut policy = SchedPolicy::default();
        let windows = preempting_windows(&mut policy, 2, 1, 100 * WINDOW);
        assert_eq!(windows, 3, "it tries SCHED_OTHER from time to time");
    }

    #[test]
    fn a_change_of_the_load_is_followed() {
        let mut policy = SchedPolicy::default();
        preempting_windows(&mut policy, 32, 32, 4 * WINDOW);
        assert!(policy.preempts);
        assert_eq!(preempting_windows(&mut policy, 32, 1, WINDOW), 1);
        assert!(!policy.preempts, "they come one by one now");
        assert_eq!(preempting_windows(&mut policy, 1, 1, (WINDOWS + 1) * WINDOW), 0);
        assert!(policy.preempts);
        // They come one by one again, which only the next look at SCHED_BATCH shows.
        assert_eq!(
            preempting_windows(&mut policy, 32, 1, (WINDOWS + 3) * WINDOW),
            WINDOWS + 2
        );
        assert!(!policy.preempts);
    }
}
