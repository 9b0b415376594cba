//! The running VMs, for requests from outside.

use std::sync::Arc;

use husk_proto::shim::v1::guest_client::GuestClient;
use husk_proto::shim::v1::pod_client::PodClient;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::transport::Channel;

use super::guest_panics::GuestPanics;
use super::object::Vmi;

/// Requests that wait at the same time.
const QUEUE: usize = 64;

/// A VMI of the node, and its pod's shim.
#[derive(Debug)]
pub struct RunningVm {
    /// The object.
    pub vmi: Arc<Vmi>,
    /// A client of the shim.
    pub client: PodClient<Channel>,
    /// A client of the guest's agent.
    pub guest: GuestClient<Channel>,
}

/// A request to the controller.
#[derive(Debug)]
pub(super) enum Query {
    Find {
        namespace: String,
        name: String,
        reply: oneshot::Sender<Option<RunningVm>>,
    },
    All(oneshot::Sender<Vec<RunningVm>>),
}

/// Finds the VMs of a [`super::VmiController`].
#[derive(Debug, Clone)]
pub struct VmiFinder {
    queries: mpsc::Sender<Query>,
    listed: watch::Receiver<bool>,
    panics: GuestPanics,
}

/// The controller's side of a [`VmiFinder`].
#[derive(Debug)]
pub(super) struct FinderChannels {
    pub(super) queries: mpsc::Receiver<Query>,
    /// True once the VMIs have been listed.
    pub(super) listed: watch::Sender<bool>,
    pub(super) panics: GuestPanics,
}

impl VmiFinder {
    pub(super) fn new() -> (VmiFinder, FinderChannels) {
        let (sender, queries) = mpsc::channel(QUEUE);
        let (listed, is_listed) = watch::channel(false);
        let panics = GuestPanics::default();
        let finder = VmiFinder {
            queries: sender,
            listed: is_listed,
            panics: panics.clone(),
        };
        let channels = FinderChannels {
            queries,
            listed,
            panics,
        };
        (finder, channels)
    }

    /// A finder of one VM, with this channel to its shim. Must be called on a tokio runtime.
    #[cfg(feature = "testing")]
    pub fn of_one(vmi: Vmi, shim: Channel) -> VmiFinder {
        let (finder, mut channels) = VmiFinder::new();
        let vmi = Arc::new(vmi);
        tokio::spawn(async move {
            while let Some(query) = channels.queries.recv().await {
                let vm = RunningVm {
                    vmi: vmi.clone(),
                    client: PodClient::new(shim.clone()),
                    guest: GuestClient::new(shim.clone()),
                };
                match query {
                    Query::Find {
                        namespace,
                        name,
                        reply,
                    } => {
                        let is_it = namespace == vmi.namespace() && name == vmi.name();
                        let _ = reply.send(is_it.then_some(vm));
                    }
                    Query::All(reply) => drop(reply.send(vec![vm])),
                }
            }
        });
        finder
    }

    /// True once the VMIs of the node have been listed.
    pub fn listed(&self) -> watch::Receiver<bool> {
        self.listed.clone()
    }

    /// Panics of the node's guests.
    pub fn panics(&self) -> &GuestPanics {
        &self.panics
    }

    /// The VMI of that name, if its pod runs under Husk on this node.
    pub async fn find(&self, namespace: String, name: String) -> Option<RunningVm> {
        let (reply, found) = oneshot::channel();
        let query = Query::Find {
            namespace,
            name,
            reply,
        };
        self.queries.send(query).await.ok()?;
        found.await.ok()?
    }

    /// All VMIs whose pods run under Husk on this node.
    pub async fn all(&self) -> Vec<RunningVm> {
        let (reply, found) = oneshot::channel();
        let sent = self.queries.send(Query::All(reply)).await;
        match sent {
            Ok(()) => found.await.unwrap_or_default(),
            Err(_) => Vec::new(),
        }
    }
}
