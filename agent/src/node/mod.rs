//! The agent's view of its node for KubeVirt: heartbeat, whether VMIs may be scheduled, and labels.
//!
//! virt-controller takes a node without a heartbeat for five minutes as dead. The scheduler places launcher pods by
//! `kubevirt.io/schedulable` and by the labels of machine types and CPUs.

mod cpu;
mod heartbeat;
mod kubevirt;
mod labels;
mod leaving;

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use crate::event::{EventSender, Kind};
use crate::vmi::ForeignVmis;
pub use kubevirt::{InstalledKubeVirt, configuration_version, follow_configuration, follow_gate};
pub use leaving::{LauncherPods, NodeShim, ShimRemoval, ShimUsers};

/// Time for the device plugins to register before the first heartbeat that may say "schedulable".
const PLUGINS_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of heartbeats, and its random part.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(60);
const HEARTBEAT_JITTER: Duration = Duration::from_secs(72);
/// The same while VMIs are not scheduled, to see soon when they can be.
const UNSCHEDULABLE_INTERVAL: Duration = Duration::from_secs(15);
/// Delay before another attempt after an error.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum time of a call to the API server.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum time for the last heartbeat of an agent that ends.
const LAST_TIMEOUT: Duration = Duration::from_secs(5);

/// Time without new VMIs before the shim is removed: a launcher pod that the scheduler has placed reaches the kubelet.
const QUIET_TIME: Duration = Duration::from_secs(30);
/// Maximum time that an agent that ends waits for the removal of the shim. The kubelet kills it after 15 s.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(8);

/// Number of VMIs that a reason names.
const SHOWN_VMIS: usize = 5;

/// A reason that keeps VMIs from the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unschedulable {
    /// The agent does not know the installed KubeVirt.
    KubeVirt(String),
    /// These device plugins are not registered.
    Plugins(Vec<&'static str>),
    /// The node has these VMIs, whose launcher pods do not run under Husk.
    Foreign(BTreeSet<String>),
    /// Husk is being removed from the node.
    Leaving(ShimRemoval),
    /// The node has no shim.
    NoShim,
    /// The labels by which the scheduler finds the node were not written.
    Labels(String),
}

impl std::fmt::Display for Unschedulable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Unschedulable::KubeVirt(reason) => f.write_str(reason),
            Unschedulable::Plugins(names) => {
                write!(f, "the kubelet does not have the devices {}", names.join(", "))
            }
            Unschedulable::Foreign(names) => {
                write!(
                    f,
                    "the launcher pods of {} do not run under Husk: stop these VMIs or move them",
                    shown(names)
                )
            }
            Unschedulable::Leaving(ShimRemoval::Listing) => f.write_str("Husk is being removed from the node"),
            Unschedulable::Leaving(ShimRemoval::Waiting(names)) => {
                write!(
                    f,
                    "Husk is being removed from the node: stop the VMIs {} first",
                    shown(names)
                )
            }
            Unschedulable::Leaving(ShimRemoval::Ready) => {
                f.write_str("Husk is being removed from the node, which has no VMI left: removing the shim")
            }
            Unschedulable::Leaving(ShimRemoval::Failed(reason)) => {
                write!(f, "Husk is being removed from the node, but the shim was not removed yet: {reason}")
            }
            Unschedulable::Leaving(ShimRemoval::Removed) => {
                f.write_str("Husk's shim is removed from the node: the label husk.io/node can be removed")
            }
            Unschedulable::NoShim => f.write_str(
                "the node has no shim of Husk's: delete the pod of husk-agent on it, and the next one installs the shim",
            ),
            Unschedulable::Labels(error) => write!(f, "the labels of the node cannot be written: {error}"),
        }
    }
}

/// The first of some VMIs.
fn shown(names: &BTreeSet<String>) -> String {
    let shown: Vec<_> = names.iter().take(SHOWN_VMIS).map(String::as_str).collect();
    let more = match names.len().saturating_sub(SHOWN_VMIS) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{}{more}", shown.join(", "))
}

impl Unschedulable {
    /// Type and reason of the event.
    fn event(&self) -> (Kind, &'static str) {
        match self {
            Unschedulable::Leaving(ShimRemoval::Removed) => (Kind::Normal, "HuskRemoved"),
            Unschedulable::Leaving(ShimRemoval::Failed(_)) => (Kind::Warning, "HuskNotRemoved"),
            Unschedulable::Leaving(_) => (Kind::Normal, "Leaving"),
            _ => (Kind::Warning, "Unschedulable"),
        }
    }
}

/// The actor that keeps the Node object.
pub struct NodeActor {
    name: String,
    kubevirt: InstalledKubeVirt,
    nodes: Api<Node>,
    events: EventSender,
    /// The device plugins, by name: true while the kubelet knows them.
    plugins: Vec<(&'static str, watch::Receiver<bool>)>,
    foreign: ForeignVmis,
    shim_users: ShimUsers,
    shim: NodeShim,
    /// The removal of the shim, while it runs.
    removal: Option<JoinHandle<Result<(), String>>>,
    /// The last error of the removal of a leaving node's shim, the number of errors in succession, and the time of the
    /// next attempt.
    failure: Option<String>,
    failures: u32,
    retry_at: Option<Instant>,
    /// When the node was first reported as not schedulable, since it last was.
    unschedulable_since: Option<Instant>,
    /// The reason that was reported last.
    reported: Option<Unschedulable>,
}

impl std::fmt::Debug for NodeActor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeActor")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl NodeActor {
    /// An actor for the node `name`.
    #[must_use]
    pub fn new(
        name: String,
        client: Client,
        events: EventSender,
        plugins: Vec<(&'static str, watch::Receiver<bool>)>,
        foreign: ForeignVmis,
        shim_users: ShimUsers,
        shim: NodeShim,
    ) -> NodeActor {
        NodeActor {
            nodes: Api::all(client.clone()),
            name,
            kubevirt: InstalledKubeVirt::new(client),
            events,
            plugins,
            foreign,
            shim_users,
            shim,
            removal: None,
            failure: None,
            failures: 0,
            retry_at: None,
            unschedulable_since: None,
            reported: None,
        }
    }

    /// Sends heartbeats until `stop` is true, and then one that says "not schedulable".
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        // An agent that has just started does not know its node yet.
        self.beat_and_log(false).await;
        let plugins = self.all_registered();
        let _ = timeout(PLUGINS_TIMEOUT, plugins).await;
        while !*stop.borrow() {
            let updated = tokio::select! {
                updated = self.update() => updated,
                _ = stop.wait_for(|stop| *stop) => break,
            };
            let next = match updated {
                Ok(true) => HEARTBEAT_INTERVAL + jitter(HEARTBEAT_JITTER),
                Ok(false) => UNSCHEDULABLE_INTERVAL,
                Err(error) => {
                    warn!(%error, "the node was not updated");
                    RETRY_INTERVAL
                }
            };
            let next = Instant::now() + next;
            tokio::select! {
                () = sleep_until(next) => {}
                () = self.changed() => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        }
        // One that is killed leaves its journal to the next agent.
        if timeout(REMOVAL_TIMEOUT, ended_if_any(&mut self.removal))
            .await
            .is_err()
        {
            warn!("the removal of the shim has not ended");
        }
        if timeout(LAST_TIMEOUT, self.beat_and_log(false)).await.is_err() {
            warn!("the API server did not answer the last heartbeat");
        }
    }

    /// Updates the Node. Returns whether VMIs are scheduled on it.
    async fn update(&mut self) -> Result<bool, kube::Error> {
        let node = with_timeout(self.nodes.get(&self.name)).await?;
        let reason = self.unschedulable(&node).await;
        // The labels come first, so that a launcher pod finds the node as soon as it is schedulable. Without the
        // heartbeat, KubeVirt takes the node for dead.
        let labelled = self.label(node.metadata).await;
        let unlabelled = labelled.as_ref().err();
        let reason = reason.or_else(|| unlabelled.map(|error| Unschedulable::Labels(error.to_string())));
        let schedulable = reason.is_none();
        self.beat(schedulable).await?;
        let removal_state = match &reason {
            Some(Unschedulable::Leaving(removal_state)) => Some(removal_state.clone()),
            _ => None,
        };
        self.report(reason).await;
        match removal_state {
            Some(ShimRemoval::Ready | ShimRemoval::Failed(_)) => self.begin_removal().await?,
            Some(_) => {}
            None => (self.failure, self.failures, self.retry_at) = (None, 0, None),
        }
        labelled.map(|()| schedulable)
    }

    /// Removes the shim in a task of its own, once no VMI can be scheduled here.
    async fn begin_removal(&mut self) -> Result<(), kube::Error> {
        let is_quiet = self
            .unschedulable_since
            .is_some_and(|since| since.elapsed() >= QUIET_TIME);
        let is_early = self.retry_at.is_some_and(|at| Instant::now() < at);
        if self.removal.is_some() || !is_quiet || is_early {
            return Ok(());
        }
        // The heartbeat took its time: VMIs and the label may be others now.
        let node = with_timeout(self.nodes.get(&self.name)).await?;
        let can_go = matches!(self.removal_state(), ShimRemoval::Ready | ShimRemoval::Failed(_));
        if leaving::is_leaving(&node) && can_go {
            let shim = self.shim.clone();
            self.removal = Some(tokio::spawn(async move { shim.remove().await }));
        }
        Ok(())
    }

    /// Takes the result of the removal.
    fn removed(&mut self, result: Result<(), String>) {
        self.failure = result.err();
        match self.failure {
            Some(_) => {
                self.failures = self.failures.saturating_add(1);
                self.retry_at = Some(Instant::now() + leaving::retry_after(self.failures));
            }
            None => (self.failures, self.retry_at) = (0, None),
        }
    }

    async fn report(&mut self, reason: Option<Unschedulable>) {
        if reason == self.reported {
            return;
        }
        match &reason {
            Some(reason) => {
                warn!(%reason, "VMIs are not scheduled on this node");
                let (kind, name) = reason.event();
                self.events
                    .send_node(&self.name, kind, name, &reason.to_string())
                    .await;
            }
            None => info!("VMIs are scheduled on this node"),
        }
        self.reported = reason;
    }

    fn removal_state(&self) -> ShimRemoval {
        if self.removal.is_some() {
            return ShimRemoval::Ready;
        }
        let vmis = self.shim_users.vmis.borrow().clone();
        let present = vmis.map(|vmis| match vmis.is_empty() {
            true => self.shim_users.launchers.names(),
            false => vmis,
        });
        ShimRemoval::of(present.as_ref(), self.shim.is_installed(), self.failure.as_ref())
    }

    async fn unschedulable(&mut self, node: &Node) -> Option<Unschedulable> {
        if leaving::is_leaving(node) || self.removal.is_some() {
            return Some(Unschedulable::Leaving(self.removal_state()));
        }
        if !self.shim.is_installed() {
            return Some(Unschedulable::NoShim);
        }
        let version = self.kubevirt.version().await;
        if let Err(reason) = version.and_then(|version| version.check()) {
            return Some(Unschedulable::KubeVirt(reason));
        }
        let missing = self
            .plugins
            .iter()
            .filter(|(_, registered)| !*registered.borrow());
        let missing: Vec<_> = missing.map(|(name, _)| *name).collect();
        if !missing.is_empty() {
            return Some(Unschedulable::Plugins(missing));
        }
        let foreign = self.foreign.borrow().clone();
        (!foreign.is_empty()).then_some(Unschedulable::Foreign(foreign))
    }

    async fn beat_and_log(&mut self, schedulable: bool) {
        if let Err(error) = self.beat(schedulable).await {
            warn!(%error, schedulable, "a heartbeat was not sent");
        }
    }

    async fn beat(&mut self, schedulable: bool) -> Result<(), kube::Error> {
        if schedulable {
            self.unschedulable_since = None;
        }
        let patch = heartbeat::patch(schedulable, Timestamp::now());
        let params = PatchParams::default();
        let patch = Patch::Strategic(patch);
        with_timeout(self.nodes.patch(&self.name, &params, &patch)).await?;
        if !schedulable {
            self.unschedulable_since.get_or_insert_with(Instant::now);
        }
        Ok(())
    }

    /// Sets KubeVirt's labels and removes those of it that are out of date.
    async fn label(&self, node: ObjectMeta) -> Result<(), kube::Error> {
        if node
            .annotations
            .as_ref()
            .is_some_and(|annotations| annotations.contains_key(labels::SKIP_NODE))
        {
            return Ok(());
        }
        let present = node.labels.unwrap_or_default();
        let wanted = labels::wanted(&cpu::Cpu::of_node());
        let Some(patch) = labels::patch(&present, &wanted) else {
            return Ok(());
        };
        let params = PatchParams::default();
        with_timeout(self.nodes.patch(&self.name, &params, &Patch::Merge(patch)))
            .await
            .map(drop)
    }

    async fn all_registered(&mut self) {
        for (_, registered) in &mut self.plugins {
            let _ = registered.wait_for(|registered| *registered).await;
        }
    }

    /// Returns when a plugin is registered or no longer is, when the VMIs that are not Husk's change, or when the
    /// removal of the shim ends.
    async fn changed(&mut self) {
        let changes = self.plugins.iter_mut().map(|(_, registered)| {
            Box::pin(async move {
                if registered.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            })
        });
        let changed = async {
            futures_util::future::select_all(changes).await;
        };
        let result = tokio::select! {
            () = changed => None,
            Ok(()) = self.foreign.changed() => None,
            result = ended(&mut self.removal) => Some(result),
        };
        if let Some(result) = result {
            self.removed(result);
        }
    }
}

/// Waits for the end of the removal, which must be there for that.
async fn ended(removal: &mut Option<JoinHandle<Result<(), String>>>) -> Result<(), String> {
    let Some(task) = removal else {
        return std::future::pending().await;
    };
    let result = task.await;
    *removal = None;
    result.unwrap_or_else(|error| Err(error.to_string()))
}

async fn ended_if_any(removal: &mut Option<JoinHandle<Result<(), String>>>) {
    if removal.is_some() {
        let _ = ended(removal).await;
    }
}

/// A call to the API server. One that takes too long is an error.
async fn with_timeout<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    timeout(CALL_TIMEOUT, call).await.unwrap_or_else(|_| {
        let text = "the API server does not answer";
        Err(kube::Error::Service(text.into()))
    })
}

/// A random time up to `most`, so that the agents of a cluster do not beat at once.
fn jitter(most: Duration) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(());
    most.mul_f64(random as f64 / u64::MAX as f64)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use http::{Method, Request, Response, StatusCode};
    use http_body_util::{BodyExt, Full};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// An API server whose admission refuses labels of machine types. Returns its client, and what it has got.
    fn refusing_labels() -> (Client, Arc<Mutex<Vec<Value>>>) {
        let got = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&got);
        let service = tower::service_fn(move |request: Request<Body>| {
            let seen = Arc::clone(&seen);
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
                let is_refused = sent["metadata"]["labels"]["machine-type.node.kubevirt.io/q35"].is_string();
                if head.method != Method::GET && !is_refused {
                    seen.lock().unwrap().push(sent.clone());
                }
                let (code, answer) = match head.method {
                    _ if is_refused => {
                        let status =
                            json!({"kind": "Status", "status": "Failure", "message": "refused", "code": 422});
                        (StatusCode::UNPROCESSABLE_ENTITY, status)
                    }
                    Method::POST => (StatusCode::CREATED, sent),
                    _ if head.uri.path().ends_with("/kubevirts") => {
                        let status = json!({"observedKubeVirtVersion": "v1.9.0"});
                        let kubevirt = json!({
                            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirt",
                            "metadata": {"name": "kubevirt"}, "status": status,
                        });
                        let list = json!({
                            "apiVersion": "kubevirt.io/v1", "kind": "KubeVirtList", "metadata": {},
                            "items": [kubevirt],
                        });
                        (StatusCode::OK, list)
                    }
                    _ => (StatusCode::OK, json!({"metadata": {"name": "node1"}})),
                };
                let mut response = Response::new(Full::new(bytes::Bytes::from(answer.to_string())));
                *response.status_mut() = code;
                Ok::<_, Infallible>(response)
            }
        });
        (Client::new(service, "default"), got)
    }

    #[tokio::test]
    async fn a_node_whose_labels_are_refused_has_a_heartbeat() {
        let (client, got) = refusing_labels();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(".installation"), "").unwrap();
        let events = EventSender::new(client.clone(), "node1".to_owned());
        let users = ShimUsers {
            vmis: watch::channel(None).1,
            launchers: LauncherPods::at(dir.path().into(), dir.path().into()),
        };
        let shim = NodeShim::new("husk".into(), "/".into(), dir.path().into());
        let foreign = watch::channel(BTreeSet::new()).1;
        let mut actor = NodeActor::new(
            "node1".to_owned(),
            client,
            events,
            Vec::new(),
            foreign,
            users,
            shim,
        );
        for _ in 0..2 {
            assert!(actor.update().await.unwrap_err().to_string().contains("refused"));
        }
        let got = got.lock().unwrap();
        let beats = got.iter().filter(|sent| {
            let metadata = &sent["metadata"];
            metadata["annotations"]["kubevirt.io/heartbeat"].is_string()
                && metadata["labels"]["kubevirt.io/schedulable"] == "false"
        });
        assert_eq!(beats.count(), 2, "{got:?}");
        let messages = got.iter().filter(|sent| sent["reason"] == "Unschedulable");
        let messages: Vec<_> = messages.map(|event| event["message"].to_string()).collect();
        assert!(
            messages.len() == 1 && messages[0].contains("labels"),
            "{messages:?}"
        );
    }
}
