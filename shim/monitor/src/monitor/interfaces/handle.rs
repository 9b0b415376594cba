//! The handle on the actor of a VM's interfaces.

use std::time::Duration;

use husk_proto::shim::v1::{AddInterfaceRequest, Interface};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::vm_network::VmNetworkError;
use crate::monitor::vm_config::OpenNic;
use crate::monitor::vm_error::VmError;
use crate::monitor::vmm_connection::VmmConnection;

/// How long is waited for the removal of one: a guest that answers has some seconds.
const REMOVED_WITHIN: Duration = Duration::from_secs(35);
/// The same if the VM is paused: enough for what a guest that stands still need not let go of.
const REMOVED_PAUSED_WITHIN: Duration = Duration::from_secs(3);

/// A handle on the actor.
#[derive(Debug, Clone)]
pub(in crate::monitor) struct InterfacesHandle {
    pub(super) mailbox: mpsc::Sender<InterfaceCommand>,
    pub(super) shown: watch::Receiver<Vec<Interface>>,
}

pub(super) type Reply<T> = oneshot::Sender<Result<T, VmError>>;

#[derive(Debug)]
pub(super) enum InterfaceCommand {
    Prepare(oneshot::Sender<Result<Vec<OpenNic>, VmNetworkError>>),
    VmStarted(VmmConnection),
    Add(AddInterfaceRequest, Reply<()>),
    Remove(String, Reply<()>),
    SetLink(String, bool, Reply<()>),
    Close(oneshot::Sender<()>),
}

impl InterfacesHandle {
    /// Prepares the interfaces of the plan.
    pub(in crate::monitor) async fn prepare(&self) -> Result<Vec<OpenNic>, VmNetworkError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.mailbox.send(InterfaceCommand::Prepare(reply)).await;
        sent.map_err(|_| VmNetworkError::Aborted)?;
        answer.await.map_err(|_| VmNetworkError::Aborted)?
    }

    /// The VM runs.
    pub(in crate::monitor) async fn vm_started(&self, connection: VmmConnection) {
        let _ = self.mailbox.send(InterfaceCommand::VmStarted(connection)).await;
    }

    /// What is told of the interfaces that there are.
    pub(in crate::monitor) fn list(&self) -> Vec<Interface> {
        self.shown.borrow().clone()
    }

    /// The same, as it changes.
    pub(in crate::monitor) fn watch(&self) -> watch::Receiver<Vec<Interface>> {
        self.shown.clone()
    }

    /// Plugs an interface.
    pub(in crate::monitor) async fn add(&self, request: AddInterfaceRequest) -> Result<(), VmError> {
        self.ask(|reply| InterfaceCommand::Add(request, reply)).await
    }

    /// Unplugs an interface that was plugged. If that takes too long it goes on, and ends when it can.
    pub(in crate::monitor) async fn remove(&self, name: String, paused: bool) -> Result<(), VmError> {
        let (limit, why) = match paused {
            true => (
                REMOVED_PAUSED_WITHIN,
                "the VM is paused, and it goes when that is resumed",
            ),
            false => (
                REMOVED_WITHIN,
                "the guest has not let go of it; it goes when it does, or at the next reset",
            ),
        };
        let text = format!("interface {name:?} is still in use: {why}");
        let removed = self.remove_within(limit, name).await;
        removed.unwrap_or_else(|| Err(VmError::timed_out(text)))
    }

    /// The same; none if it goes on.
    pub(in crate::monitor) async fn remove_within(
        &self,
        limit: Duration,
        name: String,
    ) -> Option<Result<(), VmError>> {
        timeout(limit, self.ask(|reply| InterfaceCommand::Remove(name, reply)))
            .await
            .ok()
    }

    /// Pulls an interface's cable, or plugs it in.
    pub(in crate::monitor) async fn set_link(&self, name: String, up: bool) -> Result<(), VmError> {
        self.ask(|reply| InterfaceCommand::SetLink(name, up, reply)).await
    }

    /// Takes back all that was prepared, and ends the actor; once the VMM has ended.
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
