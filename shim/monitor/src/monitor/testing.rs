//! Parts of the monitor that read messages of a VMM, a guest, a program and a snapshot, for fuzz targets.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use husk_proto::shim::v1::{Metrics, Status};
use husk_proto::vmm::v1::event::{Event as Kind, Exit, PortOpened};
use husk_proto::vmm::v1::{Event, InfoResponse};
use husk_vmi::VmPlan;
use husk_volumes::SavedVolume;
use tokio::io::AsyncRead;
use tokio::sync::watch;

use super::downward_metrics::{self, METRICS_PORT, MetricsSource};
use super::final_status::FinalStatus;
use super::guest_channel::{GuestPort, PortOpenSender, guest_channel};
use super::start::exit_event;
use super::status::StatusPublisher;
use super::{metrics, vsock};
use crate::snapshot::{OpenSnapshot, SnapshotError};
use crate::vmm_process::VmmExit;

/// The listener to the events of a VMM.
#[derive(Debug)]
pub struct EventListener {
    publisher: StatusPublisher,
    ports: Vec<PortOpenSender>,
    exit: Option<Exit>,
}

impl EventListener {
    /// A listener that also serves a port of downward metrics, whose end of the guest it returns. Must be called on a
    /// tokio runtime, which must run the future.
    pub fn new(
        plan: &VmPlan,
        vmi: &serde_json::Value,
    ) -> io::Result<(EventListener, OwnedFd, impl Future<Output = ()> + use<>)> {
        let (vmm, running) = watch::channel(None);
        let source = MetricsSource::new(plan, vmi, running);
        let (channel, port) = guest_channel(METRICS_PORT)?;
        let GuestPort { stream, open, .. } = port;
        let listener = EventListener {
            publisher: StatusPublisher::new(),
            ports: vec![open],
            exit: None,
        };
        let serve = async move {
            downward_metrics::serve(channel, source).await;
            drop(vmm);
        };
        Ok((listener, stream, serve))
    }

    /// Takes an event.
    pub fn handle(&mut self, event: &Event) {
        self.publisher.handle_vmm_event(event);
        if let Some(Kind::PortOpened(opened)) = &event.event {
            self.ports.iter().for_each(|port| port.handle_event(opened));
        }
        if let Some(exit) = exit_event(event) {
            self.exit = Some(exit.clone());
        }
    }

    /// Opens or closes the port of downward metrics.
    pub fn open_metrics_port(&mut self, open: bool) {
        let name = METRICS_PORT.to_owned();
        let opened = PortOpened { name, open };
        self.handle(&Event {
            monotonic_ns: 0,
            event: Some(Kind::PortOpened(opened)),
        });
    }

    /// The status of the VM.
    #[must_use]
    pub fn status(&self) -> Status {
        self.publisher.subscribe().borrow().clone()
    }

    /// The status after the VMM has exited.
    #[must_use]
    pub fn end(self, exit: &VmmExit) -> Status {
        let EventListener {
            publisher,
            exit: last,
            ..
        } = self;
        publisher.end(FinalStatus::of_vmm(exit, last.as_ref()));
        publisher.subscribe().borrow().clone()
    }
}

/// The metrics that a VMM's answer gives.
#[must_use]
pub fn metrics_of(vmm_info: &InfoResponse) -> Metrics {
    metrics::metrics(u32::MAX, Some(vmm_info), Vec::new())
}

/// The port of the guest that a program on vsock.sock asks for.
pub async fn vsock_port(program: &mut (impl AsyncRead + Unpin)) -> Option<u32> {
    vsock::port_asked_for(program).await
}

/// Opens a snapshot, as for a VM that goes on from it.
pub fn open_snapshot(directory: &Path) -> Result<Vec<SavedVolume>, SnapshotError> {
    OpenSnapshot::open(directory)?.volumes()
}
