//! Whether the API server answers. One task asks it, at most once in a while, however many probes there are.

use std::time::Duration;

use axum::http::Request;
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::node::configuration_version;

/// Time for which an answer is good.
const KEPT_FOR: Duration = Duration::from_secs(10);
/// Maximum time of a check. The kubelet waits ten seconds for a probe.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// Probes that wait at the same time.
const QUEUE: usize = 64;

/// The result of a check.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Health {
    /// The version that the API server reports.
    version: Result<Value, String>,
    /// Version of the KubeVirt object, as far as it is known.
    config_version: String,
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
        json!({"apiserver": api_server, "config-resource-version": self.config_version})
    }
}

/// Asks for the health of the API server.
#[derive(Debug, Clone)]
pub(super) struct ApiHealth(mpsc::Sender<oneshot::Sender<Health>>);

impl ApiHealth {
    /// Starts the task, which ends with the last handle.
    pub(super) fn start(client: Client) -> ApiHealth {
        let (sender, queries) = mpsc::channel(QUEUE);
        tokio::spawn(answer(client, queries));
        ApiHealth(sender)
    }

    /// The present health, at most [`KEPT_FOR`] old.
    pub(super) async fn get(&self) -> Health {
        let (reply, health) = oneshot::channel();
        let asked = async {
            self.0.try_send(reply).ok()?;
            health.await.ok()
        };
        asked.await.unwrap_or_else(|| Health {
            version: Err("too many probes wait".to_owned()),
            config_version: String::new(),
        })
    }
}

async fn answer(client: Client, mut queries: mpsc::Receiver<oneshot::Sender<Health>>) {
    let mut last: Option<(Instant, Health)> = None;
    while let Some(reply) = queries.recv().await {
        let fresh = last.as_ref().filter(|(at, _)| at.elapsed() < KEPT_FOR);
        let health = match fresh {
            Some((_, health)) => health.clone(),
            None => {
                let before = last.take().map(|(_, health)| health.config_version);
                let health = check(&client, before.unwrap_or_default()).await;
                last = Some((Instant::now(), health.clone()));
                health
            }
        };
        let _ = reply.send(health);
    }
}

async fn check(client: &Client, config_version: String) -> Health {
    let checked = timeout(CHECK_TIMEOUT, async {
        let request = Request::get("/version").body(Vec::new());
        let request = request.map_err(|error| error.to_string())?;
        let version = client.request::<Value>(request).await;
        let version = version.map_err(|error| error.to_string())?;
        let config_version = configuration_version(client).await;
        let config_version = config_version.map_err(|error| error.to_string())?;
        Ok((version, config_version))
    });
    let checked = checked
        .await
        .unwrap_or_else(|_| Err("the API server does not answer".to_owned()));
    match checked {
        Ok((version, config_version)) => Health {
            version: Ok(version),
            config_version,
        },
        Err(error) => Health {
            version: Err(error),
            config_version,
        },
    }
}
