//! The actor that owns the table of a VM's network interfaces, and the namespace they are in.
//!
//! It is a task of its own, which outlives the VM: what was begun is first done, then taken back. One thing comes after
//! the other, but for unplugging: the guest has seconds for it, and one that is paused takes longer.

mod plugging;
mod pod;
mod table;
mod wanted;

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

use super::ending::chain;
use super::vmm_link::Link;
use crate::surroundings::PodNetwork;
use plugging::Unplugging;
use pod::Pod;
use table::Table;
use wanted::Wanted;

pub(super) use pod::PodError;

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
pub(super) struct Handle {
    mailbox: mpsc::Sender<Command>,
    shown: watch::Receiver<Vec<Interface>>,
}

type Reply<T> = oneshot::Sender<Result<T, Status>>;

#[derive(Debug)]
enum Command {
    Prepare(oneshot::Sender<Result<Vec<OpenNic>, PodError>>),
    Began(Link),
    Add(AddInterfaceRequest, Reply<()>),
    Remove(String, Reply<()>),
    SetLink(String, bool, Reply<()>),
    Close(oneshot::Sender<()>),
}

impl Handle {
    /// Prepares the interfaces of the plan.
    pub(super) async fn prepare(&self) -> Result<Vec<OpenNic>, PodError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.mailbox.send(Command::Prepare(reply)).await;
        sent.map_err(|_| PodError::Aborted)?;
        answer.await.map_err(|_| PodError::Aborted)?
    }

    /// The VM runs.
    pub(super) async fn began(&self, link: Link) {
        let _ = self.mailbox.send(Command::Began(link)).await;
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
        self.ask(|reply| Command::Add(request, reply)).await
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
        timeout(limit, self.ask(|reply| Command::Remove(name, reply)))
            .await
            .ok()
    }

    /// Pulls an interface's cable, or plugs it in.
    pub(super) async fn set_link(&self, name: String, up: bool) -> Result<(), Status> {
        self.ask(|reply| Command::SetLink(name, up, reply)).await
    }

    /// Takes back all that was prepared, and ends the actor; once the VMM has ended.
    pub(super) async fn close(&self) {
        let (reply, done) = oneshot::channel();
        if self.mailbox.send(Command::Close(reply)).await.is_ok() {
            let _ = done.await;
        }
    }

    async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, Status> {
        let ended = || Status::failed_precondition("the VM has ended");
        let (reply, answer) = oneshot::channel();
        self.mailbox.send(command(reply)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

#[derive(Debug)]
pub(super) struct Interfaces {
    plan: Arc<VmPlan>,
    network: Option<PodNetwork>,
    dir: PathBuf,
    mailbox: mpsc::Receiver<Command>,
    pod: Option<Pod>,
    table: Table,
    link: Option<Link>,
    unplugging: Unplugging,
}

impl Interfaces {
    /// Those of a plan, in this pod's network or in one of their own; what is done there is recorded in `dir`.
    pub(super) fn new(plan: Arc<VmPlan>, network: Option<PodNetwork>, dir: PathBuf) -> (Interfaces, Handle) {
        let (sender, mailbox) = mpsc::channel(16);
        let table = Table::new();
        let handle = Handle {
            mailbox: sender,
            shown: table.subscribe(),
        };
        let interfaces = Interfaces {
            plan,
            network,
            dir,
            mailbox,
            pod: None,
            table,
            link: None,
            unplugging: Unplugging::default(),
        };
        (interfaces, handle)
    }

    /// Serves until it is closed.
    pub(super) async fn serve(mut self) {
        loop {
            tokio::select! {
                command = self.mailbox.recv() => match command {
                    Some(Command::Close(reply)) => {
                        self.close().await;
                        let _ = reply.send(());
                        return;
                    }
                    Some(command) => self.obey(command).await,
                    None => return,
                },
                Some((name, removed)) = self.unplugging.next() => self.unplugged(&name, removed).await,
                interface = self.table.failed() => {
                    warn!(interface, "the DHCP server failed: the guest's lease is not renewed");
                }
            }
        }
    }

    async fn obey(&mut self, command: Command) {
        // Whoever asked may have gone; what was asked is done all the same.
        match command {
            Command::Prepare(reply) => drop(reply.send(self.prepare().await)),
            Command::Began(link) => self.link = Some(link),
            Command::Add(request, reply) => drop(reply.send(self.add(request).await)),
            Command::Remove(name, reply) => self.remove(name, reply),
            Command::SetLink(name, up, reply) => drop(reply.send(self.set_link(&name, up).await)),
            Command::Close(_) => {}
        }
    }

    async fn prepare(&mut self) -> Result<Vec<OpenNic>, PodError> {
        if self.network.is_none() && self.plan.nics.is_empty() {
            return Ok(Vec::new());
        }
        let (plan, network, dir) = (self.plan.clone(), self.network.clone(), self.dir.clone());
        let pod = spawn_blocking(move || match network {
            Some(network) => Pod::enter(&plan, &network, &dir),
            None => Pod::make(&plan, &dir),
        });
        let pod = pod.await.map_err(|_| PodError::Aborted)??;
        self.pod = Some(pod.clone());
        let planned = (0u8..).zip(&self.plan.nics);
        let wanted: Vec<Wanted> = planned
            .map(|(index, nic)| pod.common.planned(index, nic))
            .collect();
        let ready = spawn_blocking(move || pod.prepare(&wanted)).await;
        let mut nics = Vec::new();
        for ready in ready.map_err(|_| PodError::Aborted)?? {
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
        let Some(pod) = self.pod.take() else { return };
        match spawn_blocking(move || pod.give_back()).await {
            Ok(Ok(())) => {}
            // It is tried once more when the directory goes.
            Ok(Err(error)) => error!(error = chain(&error), "the network was not given back"),
            Err(error) => error!(%error, "giving the network back was cut short"),
        }
    }
}
