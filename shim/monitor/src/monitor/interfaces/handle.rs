//! The handle to the actor of a VM's interfaces.

use std::time::Duration;

use husk_network::{GuestCounters, LinkCounters, Netns, tap_counters};
use husk_proto::shim::v1::{AddInterfaceRequest, Interface, InterfaceMetrics};
use husk_proto::vmm::v1::NicCounters;
use husk_vmi::NicDhcp;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::vm_network::VmNetworkError;
use crate::monitor::disks::ConfigLock;
use crate::monitor::vm_config::OpenNic;
use crate::monitor::vm_error::VmError;
use crate::monitor::vmm_connection::VmmConnection;
use crate::snapshot::PluggedInterface;

/// Maximum time to wait for a removal. A guest that responds takes a few seconds.
const REMOVED_WITHIN: Duration = Duration::from_secs(35);
/// The same for a paused VM, where only devices that the guest does not use can be removed.
const REMOVED_PAUSED_WITHIN: Duration = Duration::from_secs(3);

/// A handle to the actor.
#[derive(Debug, Clone)]
pub(in crate::monitor) struct InterfacesHandle {
    pub(super) mailbox: mpsc::Sender<InterfaceCommand>,
    pub(super) shown: watch::Receiver<Vec<Interface>>,
    /// The VM's namespace while it has a network.
    pub(super) netns: watch::Receiver<Option<Netns>>,
}

pub(super) type Reply<T> = oneshot::Sender<Result<T, VmError>>;

#[derive(Debug)]
pub(super) enum InterfaceCommand {
    Prepare(
        Vec<PluggedInterface>,
        oneshot::Sender<Result<Vec<OpenNic>, VmNetworkError>>,
    ),
    VmStarted(VmmConnection),
    Add {
        request: AddInterfaceRequest,
        dhcp: NicDhcp,
        link_up: bool,
        reply: Reply<()>,
    },
    Remove(String, Reply<()>),
    SetLink(String, bool, Reply<()>),
    ConfigLock(Reply<(ConfigLock, Vec<PluggedInterface>)>),
    Close(oneshot::Sender<()>),
}

impl InterfacesHandle {
    /// Prepares the interfaces of the plan, and those that were plugged into a saved VM.
    pub(in crate::monitor) async fn prepare(
        &self,
        plugged: Vec<PluggedInterface>,
    ) -> Result<Vec<OpenNic>, VmNetworkError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.mailbox.send(InterfaceCommand::Prepare(plugged, reply)).await;
        sent.map_err(|_| VmNetworkError::Aborted)?;
        answer.await.map_err(|_| VmNetworkError::Aborted)?
    }

    /// Tells the actor that the VM runs.
    pub(in crate::monitor) async fn vm_started(&self, connection: VmmConnection) {
        let _ = self.mailbox.send(InterfaceCommand::VmStarted(connection)).await;
    }

    /// The present interfaces.
    pub(in crate::monitor) fn list(&self) -> Vec<Interface> {
        self.shown.borrow().clone()
    }

    /// Watches the interfaces.
    pub(in crate::monitor) fn watch(&self) -> watch::Receiver<Vec<Interface>> {
        self.shown.clone()
    }

    /// Counters of the interfaces whose frames the kernel moves. Empty if they cannot be read.
    pub(in crate::monitor) async fn vhost_counters(&self) -> Vec<InterfaceMetrics> {
        let mut shown = self.list();
        shown.retain(|interface| interface.vhost);
        let Some(netns) = self.netns.borrow().clone().filter(|_| !shown.is_empty()) else {
            return Vec::new();
        };
        let devices: Vec<String> = shown.iter().map(|interface| interface.device.clone()).collect();
        let Ok(Ok(found)) = spawn_blocking(move || tap_counters(&netns, &devices)).await else {
            return Vec::new();
        };
        let counted = shown.into_iter().filter_map(|interface| {
            let GuestCounters { received, sent } = found.get(&interface.device)?;
            Some(InterfaceMetrics {
                name: interface.name,
                received: Some(nic_counters(received)),
                sent: Some(nic_counters(sent)),
            })
        });
        counted.collect()
    }

    /// Plugs an interface, with its link up or down. One that is present stays as it is.
    pub(in crate::monitor) async fn add(
        &self,
        request: AddInterfaceRequest,
        dhcp: NicDhcp,
        link_up: bool,
    ) -> Result<(), VmError> {
        let command = |reply| InterfaceCommand::Add {
            request,
            dhcp,
            link_up,
            reply,
        };
        self.ask(command).await
    }

    /// Unplugs a hotplugged interface. On a timeout the removal continues in the background.
    pub(in crate::monitor) async fn remove(&self, name: String, paused: bool) -> Result<(), VmError> {
        let (limit, why) = match paused {
            true => (REMOVED_PAUSED_WITHIN, "the VM is paused; it is removed at resume"),
            false => (
                REMOVED_WITHIN,
                "the guest has not released it; it is removed when the guest does, or at the next reset",
            ),
        };
        let text = format!("interface {name:?} is still in use: {why}");
        let removed = self.remove_within(limit, name).await;
        removed.unwrap_or_else(|| Err(VmError::timed_out(text)))
    }

    /// The same. Returns `None` if the removal has not completed within `limit`.
    pub(in crate::monitor) async fn remove_within(
        &self,
        limit: Duration,
        name: String,
    ) -> Option<Result<(), VmError>> {
        timeout(limit, self.ask(|reply| InterfaceCommand::Remove(name, reply)))
            .await
            .ok()
    }

    /// Sets the link state of an interface.
    pub(in crate::monitor) async fn set_link(&self, name: String, up: bool) -> Result<(), VmError> {
        self.ask(|reply| InterfaceCommand::SetLink(name, up, reply)).await
    }

    /// Keeps the interfaces as they are while the first result exists. The second has those that were plugged. Fails
    /// while one is being unplugged.
    pub(in crate::monitor) async fn lock_config(
        &self,
    ) -> Result<(ConfigLock, Vec<PluggedInterface>), VmError> {
        self.ask(InterfaceCommand::ConfigLock).await
    }

    /// Restores the network and ends the actor. Called after the VMM has exited.
    pub(in crate::monitor) async fn close(&self) {
        let (reply, done) = oneshot::channel();
        if self.mailbox.send(InterfaceCommand::Close(reply)).await.is_ok() {
            let _ = done.await;
        }
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> InterfaceCommand) -> Result<T, VmError> {
        let (reply, answer) = oneshot::channel();
        self.mailbox
            .send(command(reply))
            .await
            .map_err(|_| VmError::ended())?;
        answer.await.map_err(|_| VmError::ended())?
    }
}

fn nic_counters(counters: &LinkCounters) -> NicCounters {
    NicCounters {
        frames: counters.frames,
        bytes: counters.bytes,
        dropped: counters.dropped,
        errors: counters.errors,
    }
}
