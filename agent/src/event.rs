//! Events of the agent, as `kubectl describe` shows them. KubeVirt's account for a node's agent may create events of the
//! core API only.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::timeout;
use tracing::warn;

use crate::vmi::Vmi;

/// The component in events: KubeVirt's name for a node's agent.
const COMPONENT: &str = "virt-handler";
/// The namespace of events of objects that have none.
const NAMESPACE: &str = "default";

/// Longest message of an event, in bytes.
const MAX_MESSAGE: usize = 1024;
/// Maximum time to send an event.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Type of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// As expected.
    Normal,
    /// Something that the user may have to mend.
    Warning,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Normal => "Normal",
            Kind::Warning => "Warning",
        }
    }
}

/// Sends events from one node.
#[derive(Clone)]
pub struct EventSender {
    client: Client,
    node: String,
}

impl std::fmt::Debug for EventSender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventSender")
            .field("node", &self.node)
            .finish_non_exhaustive()
    }
}

impl EventSender {
    /// A sender on the node `node`.
    #[must_use]
    pub fn new(client: Client, node: String) -> EventSender {
        EventSender { client, node }
    }

    /// Sends an event of a node. An error is logged.
    pub async fn send_node(&self, name: &str, kind: Kind, reason: &str, message: &str) {
        let object = ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(name.to_owned()),
            // The kubelet uses the name here too.
            uid: Some(name.to_owned()),
            ..ObjectReference::default()
        };
        self.create(NAMESPACE, object, kind, reason, message).await;
    }

    /// Sends an event of a VMI. An error is logged.
    pub async fn send(&self, vmi: &Vmi, kind: Kind, reason: &str, message: &str) {
        let object = ObjectReference {
            api_version: Some("kubevirt.io/v1".to_owned()),
            kind: Some("VirtualMachineInstance".to_owned()),
            namespace: Some(vmi.namespace()),
            name: Some(vmi.name()),
            uid: Some(vmi.uid().to_owned()),
            resource_version: vmi.0.metadata.resource_version.clone(),
            ..ObjectReference::default()
        };
        self.create(&vmi.namespace(), object, kind, reason, message).await;
    }

    async fn create(
        &self,
        namespace: &str,
        object: ObjectReference,
        kind: Kind,
        reason: &str,
        message: &str,
    ) {
        let now = Time(Timestamp::now());
        let event = Event {
            metadata: ObjectMeta {
                generate_name: object.name.as_ref().map(|name| format!("{name}.")),
                ..ObjectMeta::default()
            },
            involved_object: object,
            type_: Some(kind.name().to_owned()),
            reason: Some(reason.to_owned()),
            message: Some(shortened(message)),
            source: Some(EventSource {
                component: Some(COMPONENT.to_owned()),
                host: Some(self.node.clone()),
            }),
            first_timestamp: Some(now.clone()),
            last_timestamp: Some(now),
            count: Some(1),
            ..Event::default()
        };
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let params = PostParams::default();
        match timeout(CALL_TIMEOUT, events.create(&params, &event)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => warn!(%error, reason, "an event was not sent"),
            Err(_) => warn!(reason, "an event was not sent: the API server does not answer"),
        }
    }
}

/// The message, cut to what the API server accepts.
fn shortened(message: &str) -> String {
    let end = (0..=MAX_MESSAGE.min(message.len()))
        .rev()
        .find(|end| message.is_char_boundary(*end));
    message[..end.unwrap_or(0)].to_owned()
}
