//! Scheduling policy of worker threads: `SCHED_BATCH` (does not preempt the waking vCPU) or `SCHED_OTHER` (does).
//!
//! If the worker preempts the vCPU that wakes it on the same processor, a driver with many requests submits them one
//! by one, each with an exit, a context switch and an interrupt of its own. If it does not, a driver with one request
//! at a time lets the guest go idle first and be woken again, which costs more exits than the request. Where another
//! processor is idle, the thread runs there at once under either policy.

use std::io;

/// Passes in a row with a single request after which the worker starts to preempt.
const SINGLE_REQUEST_PASSES: u32 = 32;

/// Passes while preempting after which the worker returns to `SCHED_BATCH`, because only then can it see whether
/// requests accumulate.
const REEVALUATE_AFTER: u32 = 1024;

/// Scheduling policy of the calling thread, chosen by the number of requests it finds per wake-up. A
/// [worker](crate::worker::Worker) starts with `SCHED_BATCH`.
#[derive(Debug, Default)]
pub struct SchedPolicy {
    preempts: bool,
    /// Passes in a row that found one request, since the last change.
    single_request_passes: u32,
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
        match requests {
            0 => return false,
            1 => self.single_request_passes += 1,
            _ => self.single_request_passes = 0,
        }
        let changes = if self.preempts {
            requests > 1 || self.single_request_passes >= REEVALUATE_AFTER
        } else {
            self.single_request_passes >= SINGLE_REQUEST_PASSES
        };
        if changes {
            self.preempts = !self.preempts;
            self.single_request_passes = 0;
        }
        changes
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

    #[test]
    fn one_request_at_a_time_is_served_at_once() {
        use_batch_policy();
        let mut policy = SchedPolicy::default();
        for _ in 1..SINGLE_REQUEST_PASSES {
            policy.record_pass(1);
            policy.record_pass(0);
            assert_eq!(current_policy(), libc::SCHED_BATCH);
        }
        policy.record_pass(1);
        assert_eq!(current_policy(), libc::SCHED_OTHER);
    }

    #[test]
    fn many_requests_switch_to_batch() {
        let mut policy = SchedPolicy::default();
        for requests in [1, 2].repeat(1000) {
            assert!(!policy.should_switch(requests));
        }
        for _ in 0..SINGLE_REQUEST_PASSES {
            policy.should_switch(1);
        }
        assert!(policy.preempts);
        assert!(policy.should_switch(2) && !policy.preempts, "they came together");
    }

    #[test]
    fn it_returns_to_batch_from_time_to_time() {
        let mut policy = SchedPolicy::default();
        let changes = (0..10_000).filter(|_| policy.should_switch(1)).count();
        assert_eq!(
            changes,
            2 * 10_000 / (SINGLE_REQUEST_PASSES + REEVALUATE_AFTER) as usize + 1
        );
    }
}
