//! The installed KubeVirt, as the operator reports it, and its feature gates.

use std::fmt;
use std::pin::pin;

use futures_util::{Stream, TryStreamExt};
use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tracing::warn;

use crate::watching::{WatchError, backoff, stopped, watch_config};

/// The minor versions whose contract with a node the agent knows.
const KNOWN: [(u32, u32); 1] = [(1, 9)];

/// A version of KubeVirt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeVirtVersion(String);

/// The KubeVirt of a cluster.
pub struct InstalledKubeVirt {
    client: Client,
    /// The last answer of the API server.
    last: Option<Result<KubeVirtVersion, String>>,
}

impl fmt::Debug for InstalledKubeVirt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InstalledKubeVirt")
            .field("last", &self.last)
            .finish_non_exhaustive()
    }
}

impl InstalledKubeVirt {
    /// The KubeVirt of this client's cluster.
    #[must_use]
    pub fn new(client: Client) -> InstalledKubeVirt {
        InstalledKubeVirt { client, last: None }
    }

    /// Returns the version that runs in the cluster. While the API server does not answer, the last answer stays valid:
    /// without one the agent would send no heartbeat, and KubeVirt takes a node without heartbeats for dead.
    ///
    /// # Errors
    /// The reason why there is no version: KubeVirt is not installed, does not report one yet, or the API server has
    /// never answered.
    pub async fn version(&mut self) -> Result<KubeVirtVersion, String> {
        let objects = match objects(&self.client).await {
            Ok(objects) => objects,
            Err(error) => {
                warn!(%error, "the KubeVirt objects cannot be read");
                let unknown = || Err(format!("the KubeVirt objects cannot be read: {error}"));
                return self.last.clone().unwrap_or_else(unknown);
            }
        };
        let version = match objects {
            None => Err("KubeVirt is not installed".to_owned()),
            Some(objects) => {
                let versions = objects.iter().filter_map(|object| {
                    let version = &object.data["status"]["observedKubeVirtVersion"];
                    version.as_str().filter(|version| !version.is_empty())
                });
                let version = versions.map(|version| KubeVirtVersion(version.to_owned())).next();
                version.ok_or_else(|| "the KubeVirt object does not report a version yet".to_owned())
            }
        };
        self.last.insert(version).clone()
    }
}

impl KubeVirtVersion {
    /// Checks that the agent knows the version.
    ///
    /// # Errors
    /// For another version; the text names the known ones.
    pub fn check(&self) -> Result<(), String> {
        let mut numbers = self.0.trim_start_matches('v').split('.');
        let mut number = || numbers.next()?.parse::<u32>().ok();
        let minor = number().zip(number());
        if minor.is_some_and(|minor| KNOWN.contains(&minor)) {
            return Ok(());
        }
        let known = KNOWN.map(|(major, minor)| format!("{major}.{minor}"));
        Err(format!(
            "KubeVirt {} is installed, and this agent knows {}: install another version of either",
            self.0,
            known.join(", ")
        ))
    }
}

/// Returns the version of the KubeVirt object, which has the cluster's configuration; empty if there is none.
///
/// # Errors
/// The API server does not answer.
pub async fn configuration_version(client: &Client) -> Result<String, kube::Error> {
    let objects = objects(client).await?.unwrap_or_default();
    let version = objects
        .into_iter()
        .find_map(|object| object.metadata.resource_version);
    Ok(version.unwrap_or_default())
}

/// Follows whether the feature gate `gate` is on, until `stop` is true. The gate is of state Alpha: off unless the
/// KubeVirt object lists it.
pub async fn follow_gate(
    client: Client,
    gate: &str,
    is_on: watch::Sender<bool>,
    stop: watch::Receiver<bool>,
) {
    follow_configuration(client, |kubevirt| has_gate(kubevirt, gate), is_on, stop).await;
}

/// Follows what `read` returns of the KubeVirt object, until `stop` is true. Without the object it is the default.
pub async fn follow_configuration<T: Default>(
    client: Client,
    read: impl Fn(&DynamicObject) -> T,
    value: watch::Sender<T>,
    mut stop: watch::Receiver<bool>,
) {
    let events = watcher(api(client), watch_config()).backoff(backoff());
    tokio::select! {
        () = follow(read, events, value) => {}
        () = stopped(&mut stop) => {}
    }
}

/// Follows a value by the events of the KubeVirt object, of which a cluster has one.
async fn follow<T: Default>(
    read: impl Fn(&DynamicObject) -> T,
    events: impl Stream<Item = watcher::Result<Event<DynamicObject>>>,
    value: watch::Sender<T>,
) {
    let mut events = pin!(events);
    let mut failure = WatchError::default();
    let mut listed = T::default();
    loop {
        match events.try_next().await {
            Ok(Some(Event::Init)) => listed = T::default(),
            Ok(Some(Event::InitApply(object))) => listed = read(&object),
            Ok(Some(Event::InitDone)) => {
                failure.clear();
                value.send_replace(std::mem::take(&mut listed));
            }
            Ok(Some(Event::Apply(object))) => {
                failure.clear();
                value.send_replace(read(&object));
            }
            Ok(Some(Event::Delete(_))) => drop(value.send_replace(T::default())),
            // The stream goes on with a delay, and has no end.
            Err(error) => failure.log("KubeVirt", &error),
            Ok(None) => return,
        }
    }
}

fn has_gate(object: &DynamicObject, gate: &str) -> bool {
    let gates = &object.data["spec"]["configuration"]["developerConfiguration"]["featureGates"];
    let gates = gates.as_array().into_iter().flatten();
    gates.into_iter().any(|listed| listed == gate)
}

fn api(client: Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("kubevirt.io", "v1", "KubeVirt");
    let resource = ApiResource::from_gvk_with_plural(&kind, "kubevirts");
    Api::all_with(client, &resource)
}

/// The KubeVirt objects of the cluster; `None` if KubeVirt is not installed.
async fn objects(client: &Client) -> Result<Option<Vec<DynamicObject>>, kube::Error> {
    let objects = api(client.clone());
    match super::with_timeout(objects.list(&ListParams::default())).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        list => Ok(Some(list?.items)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::api_server::ApiServer;
    use futures_util::{StreamExt, stream};
    use serde_json::{Value, json};
    use tokio::sync::mpsc;
    use tokio::time::sleep;

    #[test]
    fn only_known_minor_versions_are_accepted() {
        let check = |version: &str| KubeVirtVersion(version.to_owned()).check();
        for known in ["v1.9.0", "v1.9.3", "1.9.0", "v1.9.0-rc.1"] {
            assert_eq!(check(known), Ok(()), "{known}");
        }
        for unknown in ["v1.8.2", "v1.10.0", "v2.9.0", "devel", "", "v1"] {
            let error = check(unknown).unwrap_err();
            assert!(error.contains("this agent knows 1.9"), "{unknown}: {error}");
        }
    }

    fn kubevirt(gates: Value) -> DynamicObject {
        let configuration = json!({"developerConfiguration": {"featureGates": gates}});
        let object = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "KubeVirt",
            "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
            "spec": {"configuration": configuration},
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_gate_is_on_if_it_is_listed() {
        for off in [
            json!(null),
            json!([]),
            json!("VSOCK"),
            json!(["vsock", "VSOCK2", 1]),
        ] {
            assert!(!has_gate(&kubevirt(off.clone()), "VSOCK"), "{off}");
        }
        assert!(has_gate(&kubevirt(json!(["Root", "VSOCK"])), "VSOCK"));
    }

    #[tokio::test]
    async fn a_gate_is_followed() {
        let with = || kubevirt(json!(["VSOCK"]));
        let without = || kubevirt(json!([]));
        let (events, sent) = mpsc::unbounded_channel();
        let sent = stream::unfold(sent, async |mut sent| Some((sent.recv().await?, sent)));
        let (is_on, mut seen) = watch::channel(false);
        let read = |kubevirt: &DynamicObject| has_gate(kubevirt, "VSOCK");
        let following = tokio::spawn(async move { follow(read, sent.boxed(), is_on).await });
        let list = |object: DynamicObject| vec![Event::Init, Event::InitApply(object), Event::InitDone];
        for (changes, wanted) in [
            (list(with()), true),
            (list(without()), false),
            (vec![Event::Apply(with())], true),
            (vec![Event::Apply(without())], false),
            (list(with()), true),
            (vec![Event::Delete(with())], false),
            (list(with()), true),
            (vec![Event::Init, Event::InitDone], false),
        ] {
            for change in changes {
                events.send(Ok(change)).unwrap();
            }
            seen.changed().await.unwrap();
            assert_eq!(*seen.borrow_and_update(), wanted);
        }
        events.send(Err(watcher::Error::NoResourceVersion)).unwrap();
        drop(events);
        following.await.unwrap();
    }

    #[tokio::test]
    async fn the_kubevirt_object_is_watched() {
        let server = ApiServer::default();
        let (is_on, mut seen) = watch::channel(true);
        let (stop, stopped) = watch::channel(false);
        let following = tokio::spawn(follow_gate(server.client(), "VSOCK", is_on, stopped));
        seen.wait_for(|is_on| !*is_on).await.unwrap();
        // The watch begins after the list.
        while !*seen.borrow() {
            server.put(serde_json::to_value(kubevirt(json!(["VSOCK"]))).unwrap());
            sleep(Duration::from_millis(10)).await;
        }
        stop.send_replace(true);
        following.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn the_version_stays_known_while_the_server_does_not_answer() {
        let server = ApiServer::default();
        server.hang_kubevirt(true);
        let mut installed = InstalledKubeVirt::new(server.client());
        let unknown = installed.version().await.unwrap_err();
        assert!(unknown.contains("cannot be read"), "{unknown}");
        server.hang_kubevirt(false);
        assert_eq!(installed.version().await.unwrap().0, "v1.9.0");
        server.hang_kubevirt(true);
        assert_eq!(installed.version().await.unwrap().0, "v1.9.0");
    }
}
