//! The actor that owns the table of a VM's network interfaces, and the namespace they are in.
//!
//! It is a task of its own, which outlives the VM: what was begun is first done, then taken back. One thing comes after
//! the other, but for unplugging: the guest has seconds for it, and one that is paused takes longer.

mod hotplug;
mod interface_spec;
mod table;
mod vm_network;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use husk_proto::shim::v1::{AddInterfaceRequest, Interface};
use husk_vmi::VmPlan;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tonic::Status;
use tracing::{error, info, warn};

use super::error_chain::error_chain;
use super::vmm_connection::VmmConnection;
use crate::vm_environment::PodNetwork;
use hotplug::PendingRemovals;
use interface_spec::InterfaceSpec;
use table::InterfaceTable;
use vm_network::VmNetwork;

pub(super) use vm_network::VmNetworkError;

/// How long is waited for the removal of one: a guest that answers has some seconds.
const REMOVED_WITHIN: Duration = Duration::from_secs(35);
/// The same if the VM is paused: enough for what a guest that stands still need not let go of.
const REMOVED_PAUSED_WITHIN: Duration = Duration::from_secs(3);

/// An interface whose descriptors are to go to the VMM.
#[derive(Debug)]
pub(super) struct OpenNic {
    pub(super) name: String,
    pub(super) mac: [u8; 6],
    pub(super) mtu: u32,
    pub(super) taps: Vec<OwnedFd>,
    pub(super) vhost: Vec<OwnedFd>,
    pub(super) link_up: bool,
}

/// A handle on the actor.
#[derive(Debug, Clone)]
pub(super) struct InterfacesHandle {
    mailbox: mpsc::Sender<InterfaceCommand>,
    shown: watch::Receiver<Vec<Interface>>,
}

type Reply<T> = oneshot::Sender<Result<T, Status>>;

#[derive(Debug)]
enum InterfaceCommand {
    Prepare(oneshot::Sender<Result<Vec<OpenNic>, VmNetworkError>>),
    VmStarted(VmmConnection),
    Add(AddInterfaceRequest, Reply<()>),
    Remove(String, Reply<()>),
    SetLink(String, bool, Reply<()>),
    Close(oneshot::Sender<()>),
}

impl InterfacesHandle {
    /// Prepares the interfaces of the plan.
    pub(super) async fn prepare(&self) -> Result<Vec<OpenNic>, VmNetworkError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.mailbox.send(InterfaceCommand::Prepare(reply)).await;
        sent.map_err(|_| VmNetworkError::Aborted)?;
        answer.await.map_err(|_| VmNetworkError::Aborted)?
    }

    /// The VM runs.
    pub(super) async fn vm_started(&self, connection: VmmConnection) {
        let _ = self.mailbox.send(InterfaceCommand::VmStarted(connection)).await;
    }

    /// What is told of the interfaces that there are.
    pub(super) fn list(&self) -> Vec<Interface> {
        self.shown.borrow().clone()
    }

    /// The same, as it changes.
    pub(super) fn watch(&self) -> watch::Receiver<Vec<Interface>> {
        self.shown.clone()
    }

    /// Plugs an interface.
    pub(super) async fn add(&self, request: AddInterfaceRequest) -> Result<(), Status> {
        self.ask(|reply| InterfaceCommand::Add(request, reply)).await
    }

    /// Unplugs an interface that was plugged. If that takes too long it goes on, and ends when it can.
    pub(super) async fn remove(&self, name: String, paused: bool) -> Result<(), Status> {
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
        removed.unwrap_or_else(|| Err(Status::deadline_exceeded(text)))
    }

    /// The same; none if it goes on.
    pub(super) async fn remove_within(&self, limit: Duration, name: String) -> Option<Result<(), Status>> {
        timeout(limit, self.ask(|reply| InterfaceCommand::Remove(name, reply)))
            .await
            .ok()
    }

    /// Pulls an interface's cable, or plugs it in.
    pub(super) async fn set_link(&self, name: String, up: bool) -> Result<(), Status> {
        self.ask(|reply| InterfaceCommand::SetLink(name, up, reply)).await
    }

    /// Takes back all that was prepared, and ends the actor; once the VMM has ended.
    pub(super) async fn close(&self) {
        let (reply, done) = oneshot::channel();
        if self.mailbox.send(InterfaceCommand::Close(reply)).await.is_ok() {
            let _ = done.await;
        }
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> InterfaceCommand) -> Result<T, Status> {
        let ended = || Status::failed_precondition("the VM has ended");
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(command(reply)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

#[derive(Debug)]
pub(super) struct InterfacesActor {
    plan: Arc<VmPlan>,
    network: Option<PodNetwork>,
    dir: PathBuf,
    mailbox: mpsc::Receiver<InterfaceCommand>,
    vm_network: Option<VmNetwork>,
    table: InterfaceTable,
    connection: Option<VmmConnection>,
    removals: PendingRemovals,
}

impl InterfacesActor {
    /// Those of a plan, in this pod's network or in one of their own; what is done there is recorded in `dir`.
    pub(super) fn new(
        plan: Arc<VmPlan>,
        network: Option<PodNetwork>,
        dir: PathBuf,
    ) -> (InterfacesActor, InterfacesHandle) {
        let (sender, mailbox) = mpsc::channel(16);
        let table = InterfaceTable::new();
        let handle = InterfacesHandle {
            mailbox: sender,
            shown: table.subscribe(),
        };
        let interfaces = InterfacesActor {
            plan,
            network,
            dir,
            mailbox,
            vm_network: None,
            table,
            connection: None,
            removals: PendingRemovals::default(),
        };
        (interfaces, handle)
    }

    /// Serves until it is closed.
    pub(super) async fn run(mut self) {
        loop {
            tokio::select! {
                command = self.mailbox.recv() => match command {
                    Some(InterfaceCommand::Close(reply)) => {
                        self.close().await;
                        let _ = reply.send(());
                        return;
                    }
                    Some(command) => self.handle_command(command).await,
                    None => return,
                },
                Some((name, removed)) = self.removals.next() => self.handle_removal(&name, removed).await,
                interface = self.table.failed() => {
                    warn!(interface, "the DHCP server failed: the guest's lease is not renewed");
                }
            }
        }
    }

    async fn handle_command(&mut self, command: InterfaceCommand) {
        // Whoever asked may have gone; what was asked is done all the same.
        match command {
            InterfaceCommand::Prepare(reply) => drop(reply.send(self.prepare().await)),
            InterfaceCommand::VmStarted(connection) => self.connection = Some(connection),
            InterfaceCommand::Add(request, reply) => drop(reply.send(self.add(request).await)),
            InterfaceCommand::Remove(name, reply) => self.remove(name, reply),
            InterfaceCommand::SetLink(name, up, reply) => drop(reply.send(self.set_link(&name, up).await)),
            InterfaceCommand::Close(_) => {}
        }
    }

    async fn prepare(&mut self) -> Result<Vec<OpenNic>, VmNetworkError> {
        if self.network.is_none() && self.plan.nics.is_empty() {
            return Ok(Vec::new());
        }
        let (plan, network, dir) = (self.plan.clone(), self.network.clone(), self.dir.clone());
        let vm_network = spawn_blocking(move || match network {
            Some(network) => VmNetwork::enter(&plan, &network, &dir),
            None => VmNetwork::make(&plan, &dir),
        });
        let vm_network = vm_network.await.map_err(|_| VmNetworkError::Aborted)??;
        self.vm_network = Some(vm_network.clone());
        let planned = (0u8..).zip(&self.plan.nics);
        let spec: Vec<InterfaceSpec> = planned
            .map(|(index, nic)| vm_network.defaults.planned(index, nic))
            .collect();
        let ready = spawn_blocking(move || vm_network.prepare(&spec)).await;
        let mut nics = Vec::new();
        for ready in ready.map_err(|_| VmNetworkError::Aborted)?? {
            let Interface {
                name, device, vhost, ..
            } = &ready.shown;
            info!(interface = name, device, vhost, "interface prepared");
            self.table.add(ready.shown, ready.server, ready.index, false);
            nics.push(ready.nic);
        }
        Ok(nics)
    }

    async fn close(&mut self) {
        for server in self.table.clear().into_iter().filter_map(|entry| entry.server) {
            server.stop().await;
        }
        let Some(vm_network) = self.vm_network.take() else {
            return;
        };
        match spawn_blocking(move || vm_network.release()).await {
            Ok(Ok(())) => {}
            // It is tried once more when the directory goes.
            Ok(Err(error)) => error!(error = error_chain(&error), "the network was not given back"),
            Err(error) => error!(%error, "giving the network back was cut short"),
        }
    }
}
