//! One VM that is being followed.

use husk_monitor::client::PodClient;
use husk_proto::shim::v1::{KillRequest, Phase, ShutdownRequest, Status, WatchStatusRequest};
use tokio::sync::watch;
use tonic::Streaming;

use super::progress::Progress;
use crate::failure::{Failure, RUNTIME, chain};
use crate::status::{change_lines, exit_status, is_final};
use crate::vm_ref::VmRef;

/// How far the caller has asked the VMs to stop: 0 not at all, 1 by the power button, 2 by force.
pub(super) type StopLevel = u8;

/// The status of one VM, shown on stderr as it changes.
#[derive(Debug)]
pub(crate) struct Follower {
    vm: VmRef,
    client: PodClient,
    statuses: Streaming<Status>,
    stop_level: watch::Receiver<StopLevel>,
    last: Status,
    /// Heard, but not yet shown.
    pending: Option<Status>,
    progress: Progress,
}

impl Follower {
    /// Starts watching.
    pub(super) async fn new(
        vm: &VmRef,
        mut client: PodClient,
        stop_level: &watch::Receiver<StopLevel>,
    ) -> Result<Self, Failure> {
        let statuses = client
            .watch_status(WatchStatusRequest::default())
            .await?
            .into_inner();
        Ok(Self {
            vm: vm.clone(),
            client,
            statuses,
            stop_level: stop_level.clone(),
            last: Status::default(),
            pending: None,
            progress: Progress::new(),
        })
    }

    /// Tells what the start waits for, for as long as it is polled. Dropped, it has lost no status.
    pub(crate) async fn show_preparation(&mut self) {
        while self.pending.is_none() {
            match self.statuses.message().await {
                Ok(Some(status)) if status.phase() == Phase::Scheduled => {
                    self.progress.show(&self.vm, &status.message);
                }
                Ok(Some(status)) => self.pending = Some(status),
                _ => break,
            }
        }
        std::future::pending().await
    }

    /// The start waits for nothing any more.
    pub(crate) fn clear_preparation(&mut self) {
        self.progress.clear();
    }

    /// Tells what happens until the VM runs, or has ended already.
    pub(super) async fn until_running(&mut self) {
        while self.last.phase() != Phase::Running && !is_final(&self.last) && self.next().await {}
    }

    pub(super) fn client(&self) -> PodClient {
        self.client.clone()
    }

    /// Tells what happens and does what it is shown, until the VM's end; gives the exit status for that.
    pub(super) async fn run(mut self) -> u8 {
        while !is_final(&self.last) {
            let mut stop_level = self.stop_level.clone();
            tokio::select! {
                alive = self.next() => if !alive {
                    eprintln!("{}: its monitor died, and the VM with it", self.vm);
                    return RUNTIME;
                },
                Ok(()) = stop_level.changed() => {
                    let how = *self.stop_level.borrow_and_update();
                    self.end(how).await;
                }
            }
        }
        exit_status(&self.last)
    }

    /// Waits for the next status and tells it; false if there is none. Cancelled, none is lost.
    async fn next(&mut self) -> bool {
        let status = match self.pending.take() {
            Some(status) => status,
            None => match self.statuses.message().await {
                Ok(Some(status)) => status,
                _ => return false,
            },
        };
        for line in change_lines(&self.last, &status) {
            eprintln!("{}: {line}", self.vm);
        }
        let by_others = *self.stop_level.borrow() == 0;
        if by_others && status.stopping && !self.last.stopping && !is_final(&status) {
            eprintln!("{}: another command ends it", self.vm);
        }
        self.last = status;
        true
    }

    async fn end(&mut self, how: StopLevel) {
        let text = if how < 2 {
            match self
                .client
                .shutdown(ShutdownRequest { grace_seconds: None })
                .await
            {
                Ok(answer) => format!(
                    "shutting down; killed after {} s or at another Ctrl-C",
                    answer.get_ref().grace_seconds
                ),
                Err(status) => chain(&status),
            }
        } else {
            match self.client.kill(KillRequest {}).await {
                Ok(_) => "killing".into(),
                Err(status) => chain(&status),
            }
        };
        // A VM that has ended meanwhile is shown by its status.
        if !is_final(&self.last) {
            eprintln!("{}: {text}", self.vm);
        }
    }
}
