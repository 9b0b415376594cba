//! The health of the API server. One task asks it, at a limited rate, for all probes.

use std::time::Duration;

use axum::http::Request;
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

use crate::node::configuration_version;

/// Time for which an answer is good.
const KEPT_FOR: Duration = Duration::from_secs(10);
/// Maximum time of a check. The kubelet waits ten seconds for a probe.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time to ask for the KubeVirt object.
const CONFIG_TIMEOUT: Duration = Duration::from_secs(2);

/// The result of a check.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Health {
    /// The version that the API server reports.
    version: Result<Value, String>,
    /// The last known version of the KubeVirt object.
    config_version: Option<String>,
}

impl Health {
    pub(super) fn is_ok(&self) -> bool {
        self.version.is_ok()
    }

    /// The answer, in virt-handler's format.
    pub(super) fn json(&self) -> Value {
        let api_server = match &self.version {
            Ok(version) => json!({"connectivity": "ok", "version": version}),
            Err(error) => json!({"connectivity": "failed", "error": error}),
        };
        let mut answer = json!({"apiserver": api_server});
        if let Some(version) = &self.config_version {
            answer["config-resource-version"] = json!(version);
        }
        answer
    }
}

/// Asks for the health of the API server.
#[derive(Debug, Clone)]
pub(super) struct ApiHealth {
    wanted: mpsc::Sender<()>,
    last: watch::Receiver<Option<(Instant, Health)>>,
}

impl ApiHealth {
    /// Starts the task, which ends with the last handle.
    pub(super) fn start(client: Client) -> ApiHealth {
        let (wanted, wishes) = mpsc::channel(1);
        let (results, last) = watch::channel(None);
        tokio::spawn(answer(client, wishes, results));
        ApiHealth { wanted, last }
    }

    /// The present health, at most [`KEPT_FOR`] old. All who wait for a check get its result.
    pub(super) async fn get(&self) -> Health {
        let mut last = self.last.clone();
        if let Some(health) = fresh(&last.borrow_and_update()) {
            return health;
        }
        // If the channel is full, somebody else has asked.
        let _ = self.wanted.try_send(());
        let checked = last.changed().await.is_ok();
        let health = last.borrow().as_ref().map(|(_, health)| health.clone());
        health.filter(|_| checked).unwrap_or_else(|| Health {
            version: Err("the API server is not asked any more".to_owned()),
            config_version: None,
        })
    }
}

fn fresh(last: &Option<(Instant, Health)>) -> Option<Health> {
    let fresh = last.as_ref().filter(|(at, _)| at.elapsed() < KEPT_FOR);
    fresh.map(|(_, health)| health.clone())
}

async fn answer(
    client: Client,
    mut wishes: mpsc::Receiver<()>,
    results: watch::Sender<Option<(Instant, Health)>>,
) {
    let mut config_version = None;
    while wishes.recv().await.is_some() {
        if fresh(&results.borrow()).is_some() {
            continue;
        }
        let health = check(&client, config_version).await;
        config_version = health.config_version.clone();
        results.send_replace(Some((Instant::now(), health)));
    }
}

/// Asks the API server. Only its version decides. The KubeVirt object is for information: KubeVirt's API may be slow or
/// forbidden while the agent is well.
async fn check(client: &Client, known: Option<String>) -> Health {
    let version = async {
        let request = Request::get("/version").body(Vec::new());
        let request = request.map_err(|error| error.to_string())?;
        let version = client.request::<Value>(request).await;
        version.map_err(|error| error.to_string())
    };
    let (version, config_version) = tokio::join!(
        timeout(CHECK_TIMEOUT, version),
        timeout(CONFIG_TIMEOUT, configuration_version(client)),
    );
    Health {
        version: version.unwrap_or_else(|_| Err("the API server does not answer".to_owned())),
        config_version: config_version.ok().and_then(Result::ok).or(known),
    }
}
