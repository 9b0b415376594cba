//! The changes of a VM's status that a client is told. A client may write to a cluster's API server for each change,
//! but a guest can reboot or panic as often as it likes, and a VMM that the guest has taken over can report what it
//! likes. So a change of counters alone may wait, and so may others if there are many.

use std::time::Duration;

use husk_proto::shim::v1::{Phase, Status};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// Shortest time between two changes of counters alone.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time between other changes, on average.
const EVERY: Duration = Duration::from_millis(500);
/// Time by which they may be ahead of that: enough for eight at once.
const AHEAD: Duration = EVERY.saturating_mul(7);

#[derive(Debug)]
pub(super) struct StatusChanges {
    status: watch::Receiver<Status>,
    /// The status that was taken last.
    told: Status,
    /// When other counters than before were taken last.
    counted: Option<Instant>,
    /// The end of the time for which the other changes suffice that were taken.
    covered: Instant,
}

impl StatusChanges {
    pub(super) fn new(status: watch::Receiver<Status>) -> StatusChanges {
        let told = status.borrow().clone();
        StatusChanges {
            status,
            told,
            counted: None,
            covered: Instant::now(),
        }
    }

    /// Takes the present status.
    pub(super) fn take(&mut self) -> Status {
        let status = self.status.borrow_and_update().clone();
        if counters(&status) != counters(&self.told) {
            self.counted = Some(Instant::now());
        }
        if without_counters(&status) != without_counters(&self.told) {
            // A stream takes the status also when disks, interfaces or the guest change, before its time has come.
            let now = Instant::now();
            self.covered = (self.covered.max(now) + EVERY).min(now + AHEAD + EVERY);
        }
        self.told.clone_from(&status);
        status
    }

    /// Waits until there is a status to take. Returns false if there is none any more. Cancel safe.
    pub(super) async fn changed(&mut self) -> bool {
        loop {
            let status = self.status.borrow_and_update().clone();
            let wait = self.wait(&status);
            if wait == Some(Duration::ZERO) {
                return true;
            }
            tokio::select! {
                () = sleep(wait.unwrap_or_default()), if wait.is_some() => return true,
                changed = self.status.changed() => if changed.is_err() {
                    return wait.is_some();
                },
            }
        }
    }

    /// Time until this status is to be taken. `None` if it was.
    fn wait(&self, status: &Status) -> Option<Duration> {
        let now = Instant::now();
        let until = |time: Instant| time.saturating_duration_since(now);
        if without_counters(status) != without_counters(&self.told) {
            Some(match is_final(status) {
                true => Duration::ZERO,
                false => until(self.covered).saturating_sub(AHEAD),
            })
        } else if counters(status) != counters(&self.told) {
            Some(self.counted.map_or(Duration::ZERO, |at| until(at + INTERVAL)))
        } else {
            None
        }
    }
}

/// True if the VM has ended.
pub(super) fn is_final(status: &Status) -> bool {
    matches!(status.phase(), Phase::Succeeded | Phase::Failed)
}

fn counters(status: &Status) -> (u64, u64) {
    (status.reboots, status.panics)
}

fn without_counters(status: &Status) -> Status {
    Status {
        reboots: 0,
        panics: 0,
        ..status.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn counters_of_a_guest_that_crashes_in_a_loop_wait() {
        let (publisher, status) = watch::channel(Status::default());
        let mut changes = StatusChanges::new(status);
        let start = Instant::now();
        let crashes = tokio::spawn(async move {
            for _ in 0..500 {
                publisher.send_modify(|status| status.panics += 1);
                sleep(Duration::from_millis(10)).await;
                publisher.send_modify(|status| status.reboots += 1);
            }
        });
        let mut told = Vec::new();
        while changes.changed().await {
            told.push((start.elapsed().as_secs(), counters(&changes.take())));
        }
        crashes.await.unwrap();
        let times: Vec<u64> = told.iter().map(|(seconds, _)| *seconds).collect();
        assert_eq!(times, [0, 2, 4, 5], "{told:?}");
        assert_eq!(told.last().unwrap().1, (500, 500));
    }

    #[tokio::test(start_paused = true)]
    async fn a_vm_that_is_paused_and_resumed_in_a_loop_is_told_in_part() {
        let (publisher, status) = watch::channel(Status::default());
        let mut changes = StatusChanges::new(status);
        let start = Instant::now();
        let flips = tokio::spawn(async move {
            for _ in 0..501 {
                publisher.send_modify(|status| status.paused = !status.paused);
                sleep(Duration::from_millis(10)).await;
            }
            publisher.send_modify(|status| status.phase = Phase::Failed.into());
        });
        let mut told = Vec::new();
        while changes.changed().await {
            told.push((start.elapsed().as_secs(), changes.take()));
        }
        flips.await.unwrap();
        let within = |second: u64| told.iter().filter(|(at, _)| *at == second).count();
        assert_eq!([0, 1, 2, 3, 4].map(within), [9, 2, 2, 2, 2], "{told:?}");
        let (at, last) = told.last().unwrap();
        assert_eq!((*at, last.phase(), last.paused), (5, Phase::Failed, true));
    }

    #[tokio::test(start_paused = true)]
    async fn changes_that_are_taken_early_do_not_hold_up_later_ones_for_long() {
        let (publisher, status) = watch::channel(Status::default());
        let mut changes = StatusChanges::new(status);
        for _ in 0..201 {
            publisher.send_modify(|status| status.paused = !status.paused);
            changes.take();
        }
        publisher.send_modify(|status| status.paused = false);
        let start = Instant::now();
        assert!(changes.changed().await);
        assert_eq!(start.elapsed(), EVERY);
    }

    #[tokio::test(start_paused = true)]
    async fn other_changes_take_waiting_counters_along() {
        let (publisher, status) = watch::channel(Status::default());
        let mut changes = StatusChanges::new(status);
        publisher.send_modify(|status| status.reboots += 1);
        assert!(changes.changed().await);
        assert_eq!(changes.take().reboots, 1);
        publisher.send_modify(|status| status.reboots += 1);
        publisher.send_modify(|status| status.paused = true);
        let start = Instant::now();
        assert!(changes.changed().await);
        assert_eq!(start.elapsed(), Duration::ZERO);
        assert_eq!((changes.take().reboots, changes.told.paused), (2, true));
        drop(publisher);
        assert!(!changes.changed().await);
    }
}
