//! The events of one VMI.

use husk_proto::shim::v1::SyncVmiResponse;
use husk_proto::vmm::v1::ExitReason;
use tokio::time::Instant;
use tracing::{info, warn};

use super::VmiActor;
use crate::event::Kind;
use crate::vmi::awaited::{AwaitedVolume, VolumeOfPod};
use crate::vmi::object::Vmi;
use crate::vmi::pod::PodState;
use crate::vmi::status;

impl VmiActor {
    /// Sends the events of volumes that were removed although their last flush failed. The shim reports that once.
    pub(super) async fn report_lost_writes(&mut self, answer: &SyncVmiResponse) {
        let Some(vmi) = self.vmi() else {
            return;
        };
        for volume in answer
            .volumes
            .iter()
            .filter(|volume| volume.reason == "FlushFailed")
        {
            let message = format!("volume {:?}: {}", volume.name, volume.message);
            self.events
                .send(&vmi, Kind::Warning, "HotplugFailed", &message)
                .await;
        }
    }

    /// Sends the events of volumes whose data is missing for too long.
    pub(super) async fn report_awaited(&mut self, awaited: &[AwaitedVolume], unseen: &[VolumeOfPod]) {
        let messages = self.awaited.update(awaited, unseen, Instant::now());
        let Some(vmi) = self.vmi() else {
            return;
        };
        for message in messages {
            warn!(
                vmi = vmi.name(),
                namespace = vmi.namespace(),
                message,
                "a volume is not on the node"
            );
            self.events
                .send(&vmi, Kind::Warning, "VolumeNotReady", &message)
                .await;
        }
    }

    /// Sends the events of volumes whose entries virt-controller has removed from the status.
    pub(super) async fn report_unplugged(&mut self, vmi: &Vmi) {
        let plugged = vmi.plugged();
        for name in std::mem::replace(&mut self.plugged, plugged) {
            if !self.plugged.contains(&name) {
                let message = format!("Volume {name} has been unplugged");
                self.events
                    .send(vmi, Kind::Normal, "VolumeUnplugged", &message)
                    .await;
            }
        }
    }

    /// Counts the panics of the guest, and sends an event of each, with KubeVirt's words for a panic without details,
    /// which pvpanic has none of. A VM that runs may have had events of an agent before this one.
    pub(super) async fn report_panics(&mut self, vmi: &Vmi, state: &PodState) {
        let (panics, before) = match state {
            PodState::Running(status) => (status.panics, self.panics.unwrap_or(status.panics)),
            // An agent that starts after the VM's end has no count. Only the last panic can lack its event.
            PodState::Ended(status) => {
                let last = u64::from(status.exit() == ExitReason::GuestPanic);
                (
                    status.panics,
                    self.panics.unwrap_or(status.panics.saturating_sub(last)),
                )
            }
            _ => return,
        };
        self.panics = Some(panics);
        if panics > before {
            self.guest_panics.add(vmi, panics - before);
            let message = "GuestPanicked (details unavailable)";
            self.events
                .send(vmi, Kind::Warning, "GuestPanicked", message)
                .await;
        }
    }

    /// Sends an event of each I/O error that pauses the VM. A retry that fails is another.
    pub(super) async fn report_io_error(&mut self, vmi: &Vmi, state: &PodState) {
        let error = match state {
            PodState::Running(status) if status.paused && status.reason == "PausedIOError" => {
                Some(status.message.clone())
            }
            _ => None,
        };
        if error == self.io_error {
            return;
        }
        self.io_error = error;
        if let Some(message) = &self.io_error {
            self.events.send(vmi, Kind::Warning, "IOerror", message).await;
        }
    }

    /// Sends the events of changes of volumes, access credentials and phases.
    pub(super) async fn report(&self, old: &Vmi, new: &Vmi) {
        for (reason, message) in status::volume_events(old.status(), new.status()) {
            self.events.send(new, Kind::Normal, &reason, &message).await;
        }
        match status::credentials_event(old.status(), new.status()) {
            Some((true, _)) => {
                let (reason, message) = (
                    "AccessCredentialsSyncSuccess",
                    "Access credentials sync successful.",
                );
                self.events.send(new, Kind::Normal, reason, message).await;
            }
            Some((false, error)) => {
                let message = format!("Access credentials sync failed: {error}");
                self.events
                    .send(new, Kind::Warning, "AccessCredentialsSyncFailed", &message)
                    .await;
            }
            None => {}
        }
        let (before, after) = (old.phase(), new.phase());
        if before == after {
            return;
        }
        info!(
            vmi = new.name(),
            namespace = new.namespace(),
            phase = after,
            "phase"
        );
        let events: &[(Kind, &str, &str)] = match after {
            "Running" if self.started => &[
                (Kind::Normal, "Created", "VirtualMachineInstance defined."),
                (Kind::Normal, "Started", "VirtualMachineInstance started."),
            ],
            "Succeeded" => &[(
                Kind::Normal,
                "Stopped",
                "The VirtualMachineInstance was shut down.",
            )],
            "Failed" => &[(Kind::Warning, "Stopped", "The VirtualMachineInstance crashed.")],
            _ => &[],
        };
        for (kind, reason, message) in events {
            self.events.send(new, *kind, reason, message).await;
        }
    }
}
