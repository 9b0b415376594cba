//! Events of the agent, as `kubectl describe` shows them. KubeVirt's account for a node's agent may create events of the
//! core API only.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::PostParams;
use kube::{Api, Client};
use tracing::warn;

/// The component in events: KubeVirt's name for a node's agent.
const COMPONENT: &str = "virt-handler";
/// The namespace of events of objects that have none.
const NAMESPACE: &str = "default";

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

    /// Sends a warning about a node. An error is logged.
    pub async fn warn_node(&self, name: &str, reason: &str, message: &str) {
        let now = Time(Timestamp::now());
        let event = Event {
            metadata: ObjectMeta {
                generate_name: Some(format!("{name}.")),
                ..ObjectMeta::default()
            },
            involved_object: ObjectReference {
                kind: Some("Node".to_owned()),
                name: Some(name.to_owned()),
                // The kubelet uses the name here too.
                uid: Some(name.to_owned()),
                ..ObjectReference::default()
            },
            type_: Some("Warning".to_owned()),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            source: Some(EventSource {
                component: Some(COMPONENT.to_owned()),
                host: Some(self.node.clone()),
            }),
            first_timestamp: Some(now.clone()),
            last_timestamp: Some(now),
            count: Some(1),
            ..Event::default()
        };
        let events: Api<Event> = Api::namespaced(self.client.clone(), NAMESPACE);
        if let Err(error) = events.create(&PostParams::default(), &event).await {
            warn!(%error, reason, "an event was not sent");
        }
    }
}
