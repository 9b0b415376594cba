//! The actor that owns the table of a VM's network interfaces, and the namespace they are in.
//!
//! It is a task of its own, which outlives the VM: what was begun is first done, then taken back.

mod pod;
mod wanted;

use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use husk_proto::shim::v1::Interface;
use husk_vmi::VmPlan;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::spawn_blocking;
use tracing::{error, info, warn};

use super::ending::chain;
use crate::network::Prepared;
use crate::network::dhcp::DhcpServer;
use pod::{Pod, Ready};
use wanted::Wanted;

pub(super) use pod::PodError;

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

#[derive(Debug)]
enum Command {
    Prepare(oneshot::Sender<Result<Vec<OpenNic>, PodError>>),
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

    /// What is told of the interfaces that there are.
    pub(super) fn list(&self) -> Vec<Interface> {
        self.shown.borrow().clone()
    }

    /// Takes back all that was prepared, and ends the actor; once the VMM has ended.
    pub(super) async fn close(&self) {
        let (reply, done) = oneshot::channel();
        if self.mailbox.send(Command::Close(reply)).await.is_ok() {
            let _ = done.await;
        }
    }
}

/// An interface that there is.
#[derive(Debug)]
struct Entry {
    shown: Interface,
    server: Option<DhcpServer>,
}

#[derive(Debug)]
pub(super) struct Interfaces {
    plan: Arc<VmPlan>,
    netns: Option<PathBuf>,
    dir: PathBuf,
    mailbox: mpsc::Receiver<Command>,
    shown: watch::Sender<Vec<Interface>>,
    pod: Option<Pod>,
    table: Vec<Entry>,
}

impl Interfaces {
    /// Those of a plan, in this namespace or in one of their own; what is done there is recorded in `dir`.
    pub(super) fn new(plan: Arc<VmPlan>, netns: Option<PathBuf>, dir: PathBuf) -> (Interfaces, Handle) {
        let (sender, mailbox) = mpsc::channel(16);
        let shown = watch::Sender::new(Vec::new());
        let handle = Handle {
            mailbox: sender,
            shown: shown.subscribe(),
        };
        let interfaces = Interfaces {
            plan,
            netns,
            dir,
            mailbox,
            shown,
            pod: None,
            table: Vec::new(),
        };
        (interfaces, handle)
    }

    /// Serves until it is closed.
    pub(super) async fn serve(mut self) {
        loop {
            tokio::select! {
                command = self.mailbox.recv() => match command {
                    Some(Command::Prepare(reply)) => {
                        // Who asked may have gone, and the VM with them; then it is closed next.
                        let _ = reply.send(self.prepare().await);
                    }
                    Some(Command::Close(reply)) => {
                        self.close().await;
                        let _ = reply.send(());
                        return;
                    }
                    None => return,
                },
                index = failed(&mut self.table) => {
                    let entry = &mut self.table[index];
                    entry.server = None;
                    warn!(interface = entry.shown.name, "the DHCP server failed: the guest's lease is not renewed");
                }
            }
        }
    }

    async fn prepare(&mut self) -> Result<Vec<OpenNic>, PodError> {
        if self.netns.is_none() && self.plan.nics.is_empty() {
            return Ok(Vec::new());
        }
        let (plan, netns, dir) = (self.plan.clone(), self.netns.clone(), self.dir.clone());
        let pod = spawn_blocking(move || match netns {
            Some(netns) => Pod::enter(&plan, &netns, &dir),
            None => Pod::make(&plan, &dir),
        });
        let pod = pod.await.map_err(|_| PodError::Aborted)??;
        self.pod = Some(pod.clone());
        let planned = (0u8..).zip(&self.plan.nics);
        let wanted: Vec<Wanted> = planned
            .map(|(index, nic)| pod.common.planned(index, nic))
            .collect();
        let begun = wanted.clone();
        let ready = spawn_blocking(move || pod.prepare(&begun)).await;
        let ready = ready.map_err(|_| PodError::Aborted)??;
        let open = |(ready, wanted)| self.take(ready, wanted);
        let opened = ready.into_iter().zip(&wanted).map(open).collect();
        self.show();
        Ok(opened)
    }

    /// Takes an interface into the table; its descriptors go on.
    fn take(&mut self, Ready { prepared, server }: Ready, wanted: &Wanted) -> OpenNic {
        let shown = shown(&prepared, wanted);
        info!(
            interface = shown.name,
            device = shown.device,
            binding = shown.binding,
            mac = shown.mac,
            vhost = shown.vhost,
            "interface prepared"
        );
        self.table.push(Entry { shown, server });
        OpenNic {
            name: prepared.name,
            mac: prepared.mac.0,
            mtu: prepared.mtu,
            taps: prepared.taps,
            vhost: prepared.vhost,
            link_up: wanted.link_up,
        }
    }

    fn show(&self) {
        let all = self.table.iter().map(|entry| entry.shown.clone());
        self.shown.send_replace(all.collect());
    }

    async fn close(&mut self) {
        for server in self.table.drain(..).filter_map(|entry| entry.server) {
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

fn shown(prepared: &Prepared, wanted: &Wanted) -> Interface {
    let mut addresses: Vec<_> = prepared.nic.addresses.iter().map(|net| net.addr()).collect();
    addresses.sort_by_key(|address| address.is_ipv6());
    Interface {
        name: prepared.name.clone(),
        mac: prepared.mac.to_string(),
        device: prepared.devices.nic.clone(),
        binding: wanted.interface.binding.name().to_owned(),
        addresses: addresses.iter().map(ToString::to_string).collect(),
        mtu: prepared.mtu,
        queues: wanted.interface.queues.into(),
        link_up: wanted.link_up,
        vhost: !prepared.vhost.is_empty(),
    }
}

/// Waits for a DHCP server to end by itself; where it is in the table.
async fn failed(table: &mut [Entry]) -> usize {
    poll_fn(|context| {
        for (index, entry) in table.iter_mut().enumerate() {
            if let Some(server) = &mut entry.server
                && pin!(server.failed()).poll(context).is_ready()
            {
                return Poll::Ready(index);
            }
        }
        Poll::Pending
    })
    .await
}
