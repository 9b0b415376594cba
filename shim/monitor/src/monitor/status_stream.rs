//! The stream of a VM's status, with its disks and interfaces and what the guest's agent tells.

use std::time::Duration;

use husk_proto::shim::v1::{Disk, GuestState, Metrics, Status as VmStatus};
use husk_proto::vmm::v1 as vmm;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};

use super::handle::VmHandle;
use super::interfaces::InterfacesHandle;
use super::metrics::metrics;
use super::status_changes::{StatusChanges, is_final};
use super::vmm_connection::call_within;

/// Maximum time the VMM may take to answer `Info`.
const INFO_TIMEOUT: Duration = Duration::from_secs(2);

/// The parts of a VM's status.
#[derive(Debug)]
pub(super) struct StatusSources {
    pub(super) status: watch::Receiver<VmStatus>,
    pub(super) disks: watch::Receiver<Vec<Disk>>,
    pub(super) interfaces: InterfacesHandle,
    pub(super) guest: watch::Receiver<GuestState>,
    pub(super) vm: VmHandle,
}

impl StatusSources {
    /// The counters of a VM that runs.
    pub(super) async fn metrics(&self) -> Option<Metrics> {
        let mut running = self.vm.running()?;
        let info = call_within(INFO_TIMEOUT, running.client.info(vmm::InfoRequest {})).await;
        let said = info.ok().map(Response::into_inner);
        let vhost = self.interfaces.vhost_counters().await;
        Some(metrics(running.pid, said.as_ref(), vhost))
    }
}

/// Streams the status of a VM until its end. A slow reader misses intermediate states.
pub(super) fn watch_status(
    mut sources: StatusSources,
    metrics_seconds: u32,
) -> ReceiverStream<Result<VmStatus, Status>> {
    let (sender, stream) = mpsc::channel(1);
    let mut interfaces = sources.interfaces.watch();
    let mut changes = StatusChanges::new(sources.status.clone());
    tokio::spawn(async move {
        let mut ticks = (metrics_seconds > 0).then(|| {
            let mut ticks = interval(Duration::from_secs(metrics_seconds.into()));
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            ticks
        });
        let mut metrics = None;
        loop {
            let mut status = changes.take();
            if !is_final(&status) {
                status.disks = sources.disks.borrow_and_update().clone();
                status.interfaces = interfaces.borrow_and_update().clone();
                status.guest = Some(sources.guest.borrow_and_update().clone());
                status.metrics = metrics.take();
            }
            if sender.send(Ok(status)).await.is_err() {
                return;
            }
            tokio::select! {
                told = changes.changed() => if !told {
                    return;
                },
                true = changed(&mut sources.disks) => {}
                true = changed(&mut interfaces) => {}
                true = changed(&mut sources.guest) => {}
                () = tick(&mut ticks) => metrics = sources.metrics().await,
                () = sender.closed() => return,
            }
        }
    });
    ReceiverStream::new(stream)
}

/// Waits for a change. Never completes if there are no more.
async fn changed<T>(watch: &mut watch::Receiver<T>) -> bool {
    match watch.changed().await {
        Ok(()) => true,
        Err(_) => std::future::pending().await,
    }
}

async fn tick(ticks: &mut Option<tokio::time::Interval>) {
    match ticks {
        Some(ticks) => drop(ticks.tick().await),
        None => std::future::pending().await,
    }
}
