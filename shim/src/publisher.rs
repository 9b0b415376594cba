//! Events for containerd. They are sent in order, and again after an error.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim_protos::protobuf::{MessageField, MessageFull};
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim_async::{Client, EventsClient};
use containerd_shim_protos::ttrpc::context::{self, Context};
use containerd_shim_protos::{events, topics, ttrpc};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tracing::warn;

/// Maximum events in the queue. Further events are dropped with a warning.
const QUEUE: usize = 1024;
const WITHIN: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_secs(1);
/// Maximum attempts to send an event. containerd may be restarted meanwhile.
const TRIES: u32 = 120;
/// Maximum time to send the last events when the shim exits.
const FLUSH: Duration = Duration::from_secs(3);

/// An event of containerd.
pub(crate) trait Event: MessageFull {
    const TOPIC: &'static str;
}

macro_rules! events {
    ($($event:ident => $topic:ident,)*) => {$(
        impl Event for events::task::$event {
            const TOPIC: &'static str = topics::$topic;
        }
    )*};
}

events! {
    TaskCreate => TASK_CREATE_EVENT_TOPIC,
    TaskStart => TASK_START_EVENT_TOPIC,
    TaskExit => TASK_EXIT_EVENT_TOPIC,
    TaskDelete => TASK_DELETE_EVENT_TOPIC,
    TaskOOM => TASK_OOM_EVENT_TOPIC,
    TaskPaused => TASK_PAUSED_EVENT_TOPIC,
    TaskResumed => TASK_RESUMED_EVENT_TOPIC,
    TaskExecAdded => TASK_EXEC_ADDED_EVENT_TOPIC,
    TaskExecStarted => TASK_EXEC_STARTED_EVENT_TOPIC,
}

/// The queue of events, and the task that sends them.
#[derive(Debug)]
pub(crate) struct Publisher {
    namespace: String,
    queue: mpsc::Sender<Envelope>,
    task: JoinHandle<()>,
}

impl Publisher {
    pub(crate) fn new(address: String, namespace: String) -> Publisher {
        let (queue, queued) = mpsc::channel(QUEUE);
        let task = tokio::spawn(forward(address, namespace.clone(), queued));
        Publisher {
            namespace,
            queue,
            task,
        }
    }

    /// A publisher whose events nobody sends.
    #[cfg(test)]
    pub(crate) fn recorded() -> (Publisher, mpsc::Receiver<Envelope>) {
        let (queue, events) = mpsc::channel(QUEUE);
        let publisher = Publisher {
            namespace: "test".to_owned(),
            queue,
            task: tokio::spawn(async {}),
        };
        (publisher, events)
    }

    pub(crate) fn publish<E: Event>(&self, event: &E) {
        let Ok(value) = event.write_to_bytes() else { return };
        let envelope = Envelope {
            timestamp: MessageField::some(now()),
            namespace: self.namespace.clone(),
            topic: E::TOPIC.to_owned(),
            event: MessageField::some(any(E::descriptor().full_name(), value)),
            ..Envelope::default()
        };
        if self.queue.try_send(envelope).is_err() {
            warn!(
                topic = E::TOPIC,
                "containerd is not accepting events; this one is lost"
            );
        }
    }

    /// Sends the last events.
    pub(crate) async fn flush(self) {
        drop(self.queue);
        let _ = timeout(FLUSH, self.task).await;
    }
}

/// Packs a message as containerd's typeurl does: with its bare name.
pub(crate) fn any(name: &str, value: Vec<u8>) -> Any {
    Any {
        type_url: name.to_owned(),
        value,
        ..Any::default()
    }
}

/// The present time.
pub(crate) fn now() -> Timestamp {
    timestamp(SystemTime::now())
}

pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or_default(),
        ..Timestamp::default()
    }
}

async fn forward(address: String, namespace: String, mut queued: mpsc::Receiver<Envelope>) {
    let address = match address.starts_with("unix://") {
        true => address,
        false => format!("unix://{address}"),
    };
    let mut client = None;
    while let Some(envelope) = queued.recv().await {
        let topic = envelope.topic.clone();
        let request = containerd_shim_protos::shim::events::ForwardRequest {
            envelope: MessageField::some(envelope),
            ..Default::default()
        };
        let mut tries = 0;
        while let Err(error) = send(&mut client, &address, &namespace, &request).await {
            client = None;
            tries += 1;
            if tries == 1 || tries == TRIES {
                warn!(topic, %error, "event not delivered to containerd");
            }
            if tries == TRIES {
                break;
            }
            sleep(PAUSE).await;
        }
    }
}

async fn send(
    client: &mut Option<EventsClient>,
    address: &str,
    namespace: &str,
    request: &containerd_shim_protos::shim::events::ForwardRequest,
) -> ttrpc::Result<()> {
    let client = match client {
        Some(client) => client,
        None => client.insert(EventsClient::new(Client::connect(address).await?)),
    };
    client.forward(context_of(namespace), request).await?;
    Ok(())
}

fn context_of(namespace: &str) -> Context {
    let mut context = context::with_duration(WITHIN);
    context.metadata = HashMap::from([(
        "containerd-namespace-ttrpc".to_owned(),
        vec![namespace.to_owned()],
    )]);
    context
}
