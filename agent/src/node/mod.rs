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
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use crate::event::{EventSender, Kind};
use crate::vmi::ForeignVmis;
pub use kubevirt::{KubeVirtVersion, configuration_version};
pub use leaving::{Departure, NodeShim, NodeVmis};

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
    /// The node leaves Husk.
    Leaving(Departure),
    /// The node has no shim.
    NoShim,
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
            Unschedulable::Leaving(Departure::Listing) => f.write_str("the node leaves Husk"),
            Unschedulable::Leaving(Departure::Waiting(names)) => {
                write!(
                    f,
                    "the node leaves Husk, when {} have ended: stop these VMIs",
                    shown(names)
                )
            }
            Unschedulable::Leaving(Departure::Ready) => {
                f.write_str("the node leaves Husk, and no VMI is left: removing the shim")
            }
            Unschedulable::Leaving(Departure::Failed(reason)) => {
                write!(f, "the node leaves Husk, but the shim was not removed yet: {reason}")
            }
            Unschedulable::Leaving(Departure::Removed) => {
                f.write_str("Husk's shim is removed from the node: the label husk.io/node can be removed")
            }
            Unschedulable::NoShim => f.write_str(
                "the node has no shim of Husk's: delete the pod of husk-agent on it, and the next one installs the shim",
            ),
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
            Unschedulable::Leaving(Departure::Removed) => (Kind::Normal, "HuskRemoved"),
            Unschedulable::Leaving(Departure::Failed(_)) => (Kind::Warning, "HuskNotRemoved"),
            Unschedulable::Leaving(_) => (Kind::Normal, "Leaving"),
            _ => (Kind::Warning, "Unschedulable"),
        }
    }
}

/// The actor that keeps the Node object.
pub struct NodeActor {
    name: String,
    client: Client,
    nodes: Api<Node>,
    events: EventSender,
    /// The device plugins, by name: true while the kubelet knows them.
    plugins: Vec<(&'static str, watch::Receiver<bool>)>,
    foreign: ForeignVmis,
    vmis: NodeVmis,
    shim: NodeShim,
    /// Why the shim of a leaving node was not removed.
    failure: Option<String>,
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
        vmis: NodeVmis,
        shim: NodeShim,
    ) -> NodeActor {
        NodeActor {
            nodes: Api::all(client.clone()),
            name,
            client,
            events,
            plugins,
            foreign,
            vmis,
            shim,
            failure: None,
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
            let next = match self.update().await {
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
        if timeout(LAST_TIMEOUT, self.beat_and_log(false)).await.is_err() {
            warn!("the API server did not answer the last heartbeat");
        }
    }

    /// Updates the Node. Returns whether VMIs are scheduled on it.
    async fn update(&mut self) -> Result<bool, kube::Error> {
        let node = within(self.nodes.get(&self.name)).await?;
        let reason = self.unschedulable(&node).await?;
        let schedulable = reason.is_none();
        // The labels come first, so that a launcher pod finds the node as soon as it is schedulable.
        self.label(node.metadata).await?;
        self.beat(schedulable).await?;
        let departure = match &reason {
            Some(Unschedulable::Leaving(departure)) => Some(departure.clone()),
            _ => None,
        };
        self.report(reason).await;
        // After the heartbeat, so that no more VMIs come.
        if let Some(Departure::Ready | Departure::Failed(_)) = departure {
            self.failure = self.shim.remove().await.err();
            self.report(Some(Unschedulable::Leaving(self.departure()))).await;
        }
        Ok(schedulable)
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

    fn departure(&self) -> Departure {
        let vmis = self.vmis.borrow();
        Departure::of(vmis.as_ref(), self.shim.is_installed(), self.failure.as_ref())
    }

    async fn unschedulable(&self, node: &Node) -> Result<Option<Unschedulable>, kube::Error> {
        if leaving::is_leaving(node) {
            return Ok(Some(Unschedulable::Leaving(self.departure())));
        }
        if !self.shim.is_installed() {
            return Ok(Some(Unschedulable::NoShim));
        }
        let version = KubeVirtVersion::installed(&self.client).await?;
        if let Err(reason) = version.and_then(|version| version.check()) {
            return Ok(Some(Unschedulable::KubeVirt(reason)));
        }
        let missing = self
            .plugins
            .iter()
            .filter(|(_, registered)| !*registered.borrow());
        let missing: Vec<_> = missing.map(|(name, _)| *name).collect();
        if !missing.is_empty() {
            return Ok(Some(Unschedulable::Plugins(missing)));
        }
        let foreign = self.foreign.borrow().clone();
        Ok((!foreign.is_empty()).then_some(Unschedulable::Foreign(foreign)))
    }

    async fn beat_and_log(&self, schedulable: bool) {
        if let Err(error) = self.beat(schedulable).await {
            warn!(%error, schedulable, "a heartbeat was not sent");
        }
    }

    async fn beat(&self, schedulable: bool) -> Result<(), kube::Error> {
        let patch = heartbeat::patch(schedulable, Timestamp::now());
        let params = PatchParams::default();
        let patch = Patch::Strategic(patch);
        within(self.nodes.patch(&self.name, &params, &patch))
            .await
            .map(drop)
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
        within(self.nodes.patch(&self.name, &params, &Patch::Merge(patch)))
            .await
            .map(drop)
    }

    async fn all_registered(&mut self) {
        for (_, registered) in &mut self.plugins {
            let _ = registered.wait_for(|registered| *registered).await;
        }
    }

    /// Returns when a plugin is registered, or no longer is, or when the VMIs change that are not Husk's.
    async fn changed(&mut self) {
        let changes = self.plugins.iter_mut().map(|(_, registered)| {
            Box::pin(async move {
                if registered.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            })
        });
        tokio::select! {
            _ = futures_util::future::select_all(changes) => {}
            Ok(()) = self.foreign.changed() => {}
        }
    }
}

/// A call to the API server. One that takes too long is an error.
async fn within<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
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
