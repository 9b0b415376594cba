//! Follows the status of one VM.

use husk_monitor::client::PodClient;
use husk_proto::shim::v1::{KillRequest, Phase, ShutdownRequest, Status, WatchStatusRequest};
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::Streaming;

use super::progress::Progress;
use crate::failure::{Failure, RUNTIME, chain};
use crate::live_vm::MONITOR_TIMEOUT;
use crate::status::{change_lines, exit_status, is_final};
use crate::vm_ref::VmRef;

/// Step of shutting down that the user has asked for: 0 none, 1 the power button, 2 a kill.
pub(super) type StopLevel = u8;

/// Prints the status changes of one VM to stderr.
#[derive(Debug)]
pub(crate) struct Follower {
    vm: VmRef,
    client: PodClient,
    statuses: Streaming<Status>,
    stop_level: watch::Receiver<StopLevel>,
    last: Status,
    /// Received but not yet printed.
    pending: Option<Status>,
    progress: Progress,
}

impl Follower {
    /// Subscribes to the status of the VM.
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

    /// Shows the progress of the start for as long as it is polled. Cancellation-safe.
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

    /// Clears the progress line.
    pub(crate) fn clear_preparation(&mut self) {
        self.progress.clear();
    }

    /// Prints status changes until the VM runs or has ended.
    pub(super) async fn until_running(&mut self) {
        while self.last.phase() != Phase::Running && !is_final(&self.last) && self.next().await {}
    }

    pub(super) fn client(&self) -> PodClient {
        self.client.clone()
    }

    /// Prints status changes and passes stop requests on until the VM has ended. Returns the exit status.
    pub(super) async fn run(mut self) -> u8 {
        while !is_final(&self.last) {
            let mut stop_level = self.stop_level.clone();
            tokio::select! {
                alive = self.next() => if !alive {
                    eprintln!("{}: the monitor died and the VM ended", self.vm);
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

    /// Waits for the next status and prints the changes; false if the stream has ended. Cancellation-safe.
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
            eprintln!("{}: is being stopped by another command", self.vm);
        }
        self.last = status;
        true
    }

    async fn end(&mut self, how: StopLevel) {
        let asked = timeout(MONITOR_TIMEOUT, self.ask(how)).await;
        let text = asked.unwrap_or_else(|_| "its monitor does not answer".to_owned());
        // If the VM has ended meanwhile, its status was printed already.
        if !is_final(&self.last) {
            eprintln!("{}: {text}", self.vm);
        }
    }

    /// Asks the monitor to end the VM. Returns the answer for the user.
    async fn ask(&mut self, how: StopLevel) -> String {
        if how >= 2 {
            return match self.client.kill(KillRequest {}).await {
                Ok(_) => "killing".into(),
                Err(status) => chain(&status),
            };
        }
        let request = ShutdownRequest { grace_seconds: None };
        match self.client.shutdown(request).await {
            Ok(answer) => format!(
                "shutting down (force-off in {} s or with another Ctrl-C)",
                answer.get_ref().grace_seconds
            ),
            Err(status) => chain(&status),
        }
    }
}
