//! The changes of a VM's status that a client is told. A guest can reboot or panic as often as it likes, and a client
//! may write to a cluster's API server for each change, so a change of counters alone may wait.

use std::time::Duration;

use husk_proto::shim::v1::Status;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Shortest time between two changes of counters alone.
const INTERVAL: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct StatusChanges {
    status: watch::Receiver<Status>,
    /// The status that was taken last.
    told: Status,
    /// When other counters than before were taken last.
    counted: Option<Instant>,
}

impl StatusChanges {
    pub(super) fn new(status: watch::Receiver<Status>) -> StatusChanges {
        let told = status.borrow().clone();
        StatusChanges {
            status,
            told,
            counted: None,
        }
    }

    /// Takes the present status.
    pub(super) fn take(&mut self) -> Status {
        let status = self.status.borrow_and_update().clone();
        if counters(&status) != counters(&self.told) {
            self.counted = Some(Instant::now());
        }
        self.told.clone_from(&status);
        status
    }

    /// Waits until there is a status to take. Returns false if there is none any more. Cancel safe.
    pub(super) async fn changed(&mut self) -> bool {
        loop {
            let counted = {
                let status = self.status.borrow_and_update();
                if without_counters(&status) != without_counters(&self.told) {
                    return true;
                }
                counters(&status) != counters(&self.told)
            };
            let due = self.counted.map_or_else(Instant::now, |at| at + INTERVAL);
            tokio::select! {
                biased;
                () = sleep_until(due), if counted => return true,
                changed = self.status.changed() => if changed.is_err() {
                    return counted;
                },
            }
        }
    }
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
    use tokio::time::sleep;

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
