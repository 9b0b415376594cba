//! Events of the agent, as `kubectl describe` shows them. KubeVirt's account for a node's agent may create events of the
//! core API only.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use crate::vmi::Vmi;

/// The component in events: KubeVirt's name for a node's agent.
const COMPONENT: &str = "virt-handler";
/// The namespace of events of objects that have none.
const NAMESPACE: &str = "default";

/// Longest message of an event, in bytes.
const MAX_MESSAGE: usize = 1024;
/// Events of a VMI and reason that are sent at once, and the time after which there is one more: client-go's.
const BURST: u32 = 25;
const REFILL: Duration = Duration::from_secs(300);
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
    limit: EventLimit,
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
        EventSender {
            client,
            node,
            limit: EventLimit::default(),
        }
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

    /// Sends an event of a VMI. An error is logged. An event beyond the limit is dropped.
    pub async fn send(&self, vmi: &Vmi, kind: Kind, reason: &str, message: &str) {
        if !self.limit.take(vmi.uid(), reason) {
            debug!(vmi = vmi.name(), reason, "too many events");
            return;
        }
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

/// Limits the events of a VMI for each reason, since a guest can cause them, for example by a panic after each boot.
#[derive(Clone, Default)]
struct EventLimit(Arc<Mutex<HashMap<(String, String), Bucket>>>);

/// The events that may be sent at once.
struct Bucket {
    tokens: u32,
    /// The time from which on the next token grows.
    since: Instant,
}

impl EventLimit {
    /// Returns whether an event may be sent.
    fn take(&self, uid: &str, reason: &str) -> bool {
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        buckets.retain(|_, bucket| bucket.refill(now) < BURST);
        let bucket = buckets.entry((uid.to_owned(), reason.to_owned()));
        let bucket = bucket.or_insert(Bucket {
            tokens: BURST,
            since: now,
        });
        let allowed = bucket.tokens > 0;
        bucket.tokens = bucket.tokens.saturating_sub(1);
        allowed
    }
}

impl Bucket {
    /// Adds the tokens that are due, and returns the new number.
    fn refill(&mut self, now: Instant) -> u32 {
        while self.tokens < BURST && now.duration_since(self.since) >= REFILL {
            self.tokens += 1;
            self.since += REFILL;
        }
        self.tokens
    }
}

/// The message, cut to what the API server accepts.
fn shortened(message: &str) -> String {
    let end = (0..=MAX_MESSAGE.min(message.len()))
        .rev()
        .find(|end| message.is_char_boundary(*end));
    message[..end.unwrap_or(0)].to_owned()
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;
    use crate::testing::api_server::ApiServer;

    #[tokio::test(start_paused = true)]
    async fn events_of_one_reason_are_limited() {
        let api = ApiServer::default();
        let events = EventSender::new(api.client(), "node1".to_owned());
        let vmi = |name| Vmi(serde_json::from_value(crate::vmi::testing::scheduled(name)).unwrap());
        let (first, second) = (vmi("first"), vmi("second"));
        let count = |name: &str| api.events(name).len();
        for _ in 0..100 {
            events.send(&first, Kind::Warning, "GuestPanicked", "again").await;
        }
        assert_eq!(count("first"), 25);
        events.send(&first, Kind::Warning, "SyncFailed", "other").await;
        events
            .send(&second, Kind::Warning, "GuestPanicked", "first")
            .await;
        assert_eq!((count("first"), count("second")), (26, 1));
        for (pause, more) in [(REFILL, 1), (2 * REFILL, 2), (1000 * REFILL, 25)] {
            let before = count("first");
            advance(pause).await;
            for _ in 0..100 {
                events.send(&first, Kind::Warning, "GuestPanicked", "again").await;
            }
            assert_eq!(count("first"), before + more, "{pause:?}");
        }
        advance(25 * REFILL).await;
        events.send(&second, Kind::Normal, "Created", "last").await;
        assert_eq!(events.limit.0.lock().unwrap().len(), 1);
    }
}
