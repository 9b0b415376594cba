//! Tries the requests that failed on the host again, by resuming the VM that an I/O error has paused.
//!
//! The intervals are those of KubeVirt's virt-handler. A VM that is paused for another reason too stays paused.

use std::time::Duration;

use husk_proto::shim::v1::Status as VmStatus;
use husk_proto::vmm::v1::{PauseReason, ResumeRequest};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info};

use super::handle::VMM_TIMEOUT;
use super::status::PAUSED_IO_ERROR;
use super::vm::RunningVmm;
use super::vm_error::VmError;
use super::vmm_connection::call_within;

/// Time between the first two retries, doubled with each one up to the maximum.
const FIRST_WAIT: Duration = Duration::from_secs(10);
const LAST_WAIT: Duration = Duration::from_secs(180);
/// An error more than this after the last retry is a new one: its first retry is at once.
const SAME_ERROR: Duration = Duration::from_secs(30);

/// The times of retries.
#[derive(Debug, Default)]
struct Schedule {
    /// The last retry, and the time to wait after it.
    last: Option<(Instant, Duration)>,
}

impl Schedule {
    /// Returns the time of the retry for an error at `now`.
    fn next(&mut self, now: Instant) -> Instant {
        match self.last {
            Some((last, wait)) if now - last < SAME_ERROR => last + wait,
            _ => {
                self.last = None;
                now
            }
        }
    }

    /// Records a retry.
    fn retried(&mut self, now: Instant) {
        let wait = self.last.map_or(FIRST_WAIT, |(_, wait)| LAST_WAIT.min(wait * 2));
        self.last = Some((now, wait));
    }
}

/// Resumes the VM after each I/O error. Runs until the publisher of the status is dropped.
pub(super) async fn retry_after_io_errors(
    status: watch::Receiver<VmStatus>,
    vmm: watch::Receiver<Option<RunningVmm>>,
) {
    let resume = || {
        let running = vmm.borrow().clone();
        async {
            let mut client = running.ok_or_else(VmError::not_running)?.client;
            let request = ResumeRequest {
                reason: PauseReason::IoError.into(),
            };
            call_within(VMM_TIMEOUT, client.resume(request)).await.map(drop)
        }
    };
    retry(status, resume).await;
}

async fn retry<F>(mut status: watch::Receiver<VmStatus>, resume: impl Fn() -> F)
where
    F: Future<Output = Result<(), VmError>>,
{
    let failed = |status: &VmStatus| status.paused && status.reason == PAUSED_IO_ERROR;
    let mut schedule = Schedule::default();
    while status.wait_for(failed).await.is_ok() {
        let time = schedule.next(Instant::now());
        tokio::select! {
            // A user has resumed the VM, or it has ended.
            _ = status.wait_for(|status| !failed(status)) => continue,
            () = sleep_until(time) => {}
        }
        match resume().await {
            Ok(()) => info!("the VM is resumed after an I/O error, and its requests are tried again"),
            Err(error) => debug!(%error, "the VM is not resumed after an I/O error"),
        }
        schedule.retried(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::sync::Mutex;

    use tokio::time::sleep;

    use super::*;

    fn paused(paused: bool) -> impl FnOnce(&mut VmStatus) {
        move |status| {
            status.paused = paused;
            status.reason = if paused { PAUSED_IO_ERROR } else { "" }.into();
        }
    }

    /// Seconds from the first retry to each other, in 15 minutes; `works` says if the VM runs after the `n`th.
    async fn retries(works: impl Fn(usize) -> bool) -> Vec<u64> {
        let publisher = watch::Sender::new(VmStatus::default());
        publisher.send_modify(paused(true));
        let (start, times) = (Instant::now(), Mutex::new(Vec::new()));
        let resume = || {
            let mut times = times.lock().unwrap();
            times.push(start.elapsed().as_secs());
            publisher.send_modify(paused(!works(times.len())));
            ready(Ok(()))
        };
        tokio::select! {
            () = retry(publisher.subscribe(), resume) => unreachable!(),
            () = async {
                sleep(Duration::from_mins(10)).await;
                publisher.send_modify(paused(true));
                sleep(Duration::from_mins(5)).await;
            } => {}
        }
        times.into_inner().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn intervals_are_doubled_up_to_three_minutes() {
        let expected = [0, 10, 30, 70, 150, 310, 490, 670, 850];
        assert_eq!(retries(|_| false).await, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_error_is_retried_at_once() {
        assert_eq!(retries(|_| true).await, [0, 600]);
        assert_eq!(retries(|n| n == 3).await, [0, 10, 30, 600, 610, 630, 670, 750]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_vm_that_was_resumed_is_not_resumed_again() {
        let publisher = watch::Sender::new(VmStatus::default());
        let count = Mutex::new(0);
        let resume = || {
            *count.lock().unwrap() += 1;
            ready(Ok(()))
        };
        let life = async {
            publisher.send_modify(paused(true));
            sleep(Duration::from_secs(5)).await;
            publisher.send_modify(paused(false));
            sleep(Duration::from_mins(10)).await;
            publisher.send_modify(|status| status.paused = true);
            sleep(Duration::from_mins(10)).await;
        };
        tokio::select! {
            () = retry(publisher.subscribe(), resume) => unreachable!(),
            () = life => {}
        }
        assert_eq!(*count.lock().unwrap(), 1);
    }
}
