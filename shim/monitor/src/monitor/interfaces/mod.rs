//! The actor that owns the table of a VM's network interfaces and their network namespace.
//!
//! Its task outlives the VM: a preparation that has started is completed, then undone. Requests are handled one after
//! the other, except removals: the guest may take seconds to release a device, and longer if it is paused.

mod handle;
mod hotplug;
mod interface_spec;
mod removals;
mod table;
mod vm_network;

use std::path::PathBuf;
use std::sync::{Arc, Weak};

use husk_network::Netns;
use husk_proto::shim::v1::Interface;
use husk_vmi::VmPlan;
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tracing::{error, info, warn};

use super::disks::ConfigLock;
use super::error_chain::error_chain;
use super::vm_config::OpenNic;
use super::vm_error::VmError;
use super::vmm_connection::VmmConnection;
use crate::snapshot::{PluggedInterface, SnapshotError};
use crate::vm_environment::PodNetwork;
use handle::InterfaceCommand;
use interface_spec::InterfaceSpec;
use removals::PendingRemovals;
use table::{InterfaceTable, Origin};
use vm_network::VmNetwork;

pub(super) use handle::InterfacesHandle;
pub(super) use vm_network::VmNetworkError;

#[derive(Debug)]
pub(super) struct InterfacesActor {
    plan: Arc<VmPlan>,
    network: Option<PodNetwork>,
    dir: PathBuf,
    mailbox: mpsc::Receiver<InterfaceCommand>,
    vm_network: Option<VmNetwork>,
    /// The namespace, for readers of counters.
    netns: watch::Sender<Option<Netns>>,
    table: InterfaceTable,
    connection: Option<VmmConnection>,
    removals: PendingRemovals,
    held: Weak<()>,
}

impl InterfacesActor {
    /// Creates the actor for the interfaces of a plan, in the pod's network or in a namespace of their own. Changes to
    /// the network are recorded in `dir`.
    pub(super) fn new(
        plan: Arc<VmPlan>,
        network: Option<PodNetwork>,
        dir: PathBuf,
    ) -> (InterfacesActor, InterfacesHandle) {
        let (sender, mailbox) = mpsc::channel(16);
        let table = InterfaceTable::new();
        let (netns, watched) = watch::channel(None);
        let handle = InterfacesHandle {
            mailbox: sender,
            shown: table.subscribe(),
            netns: watched,
        };
        let interfaces = InterfacesActor {
            plan,
            network,
            dir,
            mailbox,
            vm_network: None,
            netns,
            table,
            connection: None,
            removals: PendingRemovals::default(),
            held: Weak::new(),
        };
        (interfaces, handle)
    }

    /// Handles requests until `Close`.
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
        // The request is carried out even if its caller is gone.
        match command {
            InterfaceCommand::Prepare(plugged, reply) => drop(reply.send(self.prepare(plugged).await)),
            InterfaceCommand::VmStarted(connection) => self.connection = Some(connection),
            InterfaceCommand::Add {
                request,
                dhcp,
                link_up,
                reply,
            } => drop(reply.send(self.add(request, dhcp, link_up).await)),
            InterfaceCommand::Remove(name, reply) => self.remove(name, reply),
            InterfaceCommand::SetLink(name, up, reply) => drop(reply.send(self.set_link(&name, up).await)),
            InterfaceCommand::ConfigLock(reply) => drop(reply.send(self.lock_config())),
            InterfaceCommand::Close(_) => {}
        }
    }

    /// Prepares the interfaces of the plan, and those that were plugged into a saved VM.
    async fn prepare(&mut self, plugged: Vec<PluggedInterface>) -> Result<Vec<OpenNic>, VmNetworkError> {
        if self.network.is_none() && self.plan.nics.is_empty() && plugged.is_empty() {
            return Ok(Vec::new());
        }
        let is_optional = self.plan.nics.is_empty()
            && plugged.is_empty()
            && self.network.as_ref().is_some_and(PodNetwork::is_given);
        let (plan, network, dir) = (self.plan.clone(), self.network.clone(), self.dir.clone());
        let vm_network = spawn_blocking(move || match network {
            Some(network) => VmNetwork::enter(&plan, &network, &dir),
            None => VmNetwork::make(&plan, &dir),
        });
        let vm_network = match vm_network.await.map_err(|_| VmNetworkError::Aborted)? {
            Ok(vm_network) => vm_network,
            // A VM of a pod runs without interfaces too, but gets none later.
            Err(error) if is_optional => {
                warn!(%error, "no interface can be plugged");
                return Ok(Vec::new());
            }
            Err(error) => return Err(error),
        };
        self.netns.send_replace(Some(vm_network.netns()));
        self.vm_network = Some(vm_network.clone());
        let mut indices = 0u8..;
        let planned = self.plan.nics.iter().zip(indices.by_ref());
        let planned = planned.map(|(nic, index)| (vm_network.defaults.planned(index, nic), None));
        let mut spec: Vec<(InterfaceSpec, Option<PluggedInterface>)> = planned.collect();
        for (interface, index) in plugged.into_iter().zip(indices) {
            let saved = vm_network.defaults.saved(index, &interface);
            spec.push((saved, Some(interface)));
        }
        let (spec, plugged): (Vec<_>, Vec<_>) = spec.into_iter().unzip();
        let ready = spawn_blocking(move || vm_network.prepare(&spec)).await;
        let mut nics = Vec::new();
        for (ready, plugged) in ready
            .map_err(|_| VmNetworkError::Aborted)??
            .into_iter()
            .zip(plugged)
        {
            let Interface {
                name, device, vhost, ..
            } = &ready.shown;
            info!(interface = name, device, vhost, "interface prepared");
            let slot = plugged.as_ref().map(|plugged| plugged.pci_slot);
            let origin = plugged.map_or(Origin::Start, |plugged| Origin::Plugged(slot, plugged.dhcp));
            self.table.add(ready.shown, ready.server, ready.index, origin);
            nics.push(OpenNic {
                pci_slot: slot,
                ..ready.nic
            });
        }
        Ok(nics)
    }

    fn lock_config(&mut self) -> Result<(ConfigLock, Vec<PluggedInterface>), VmError> {
        if let Some(name) = self.removals.waiters.keys().next() {
            let reason = "it is being unplugged: wait until the guest has released it, or reset the VM, which ends that";
            return Err(SnapshotError::interface(name, reason).into());
        }
        let plugged = self.table.plugged()?;
        let lock = Arc::new(());
        self.held = Arc::downgrade(&lock);
        Ok((lock, plugged))
    }

    async fn close(&mut self) {
        self.netns.send_replace(None);
        for server in self.table.clear().into_iter().filter_map(|entry| entry.server) {
            server.stop().await;
        }
        let Some(vm_network) = self.vm_network.take() else {
            return;
        };
        match spawn_blocking(move || vm_network.release()).await {
            Ok(Ok(())) => {}
            // Removing the VM's directory tries it again.
            Ok(Err(error)) => error!(error = error_chain(&error), "the network was not restored"),
            Err(error) => error!(%error, "restoring the network was interrupted"),
        }
    }
}
