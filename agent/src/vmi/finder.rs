//! The running VMs by name, for requests from outside.

use std::sync::Arc;

use husk_proto::shim::v1::pod_client::PodClient;
use tokio::sync::{mpsc, oneshot};
use tonic::transport::Channel;

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
}

/// A request to the controller.
#[derive(Debug)]
pub(super) struct Query {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) reply: oneshot::Sender<Option<RunningVm>>,
}

/// Finds the VMs of a [`super::VmiController`].
#[derive(Debug, Clone)]
pub struct VmiFinder(mpsc::Sender<Query>);

impl VmiFinder {
    pub(super) fn new() -> (VmiFinder, mpsc::Receiver<Query>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (VmiFinder(sender), receiver)
    }

    /// The VMI of that name, if its pod runs under Husk on this node.
    pub async fn find(&self, namespace: String, name: String) -> Option<RunningVm> {
        let (reply, found) = oneshot::channel();
        let query = Query {
            namespace,
            name,
            reply,
        };
        self.0.send(query).await.ok()?;
        found.await.ok()?
    }
}
