//! A node: the kubelet, and what it starts.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use husk_agent_testing::device_manager::{DeviceManager, api, connect};
use husk_agent_testing::shim::Shim;
use husk_proto::shim::v1::Phase;
use jiff::Timestamp;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod, ServiceAccount};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::Kubeconfig;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::{info, warn};

/// Interval at which a kubelet renews the lease of its node.
const LEASE_INTERVAL: Duration = Duration::from_secs(10);
/// Delay before another attempt after an error.
const RETRY: Duration = Duration::from_secs(1);
/// Time that a guest takes to power off.
const POWER_OFF: Duration = Duration::from_secs(1);
/// Devices that the agent publishes.
const DEVICES: usize = 3;

/// The kubelet of one node.
#[derive(Clone)]
pub struct Kubelet {
    number: u32,
    client: Client,
    /// Directory of the node's files.
    dir: PathBuf,
    /// The program of the DaemonSet's pod.
    agent: PathBuf,
}

impl Kubelet {
    /// The kubelet of node `number`, with files below `dir`.
    pub fn new(number: u32, client: Client, dir: &Path, agent: PathBuf) -> Result<Kubelet> {
        let dir = dir.join(format!("played-{number}"));
        for part in ["plugins", "run", "pods", "logs", "versions", "certificates"] {
            let part = dir.join(part);
            std::fs::create_dir_all(&part).with_context(|| part.display().to_string())?;
        }
        // The record of an installed shim.
        std::fs::write(dir.join("versions/.installation"), "")?;
        Ok(Kubelet {
            number,
            client,
            dir,
            agent,
        })
    }

    /// Name of the node.
    pub fn name(&self) -> String {
        format!("played-{}", self.number)
    }

    /// Creates the Node object.
    pub async fn register(&self) -> Result<()> {
        let (name, now) = (self.name(), Timestamp::now().to_string());
        let resources = json!({"cpu": "1000", "memory": "4Ti", "ephemeral-storage": "4Ti", "pods": "1000"});
        let node = json!({
            "metadata": {
                "name": name,
                "labels": {
                    "kubernetes.io/hostname": name,
                    "kubernetes.io/arch": "amd64",
                    "kubernetes.io/os": "linux",
                    "husk.io/node": "true",
                },
            },
            "status": {
                "capacity": resources,
                "allocatable": resources,
                "addresses": [{"type": "InternalIP", "address": self.address()}],
                "conditions": [{
                    "type": "Ready", "status": "True", "reason": "KubeletReady",
                    "lastHeartbeatTime": now, "lastTransitionTime": now,
                }],
            },
        });
        let node: Node = serde_json::from_value(node)?;
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes.create(&PostParams::default(), &node).await?;
        Ok(())
    }

    /// Address of the node, which nothing connects to.
    fn address(&self) -> String {
        format!("172.30.1.{}", self.number)
    }

    /// Renews the node's lease for ever.
    pub async fn keep_lease(self) {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), "kube-node-lease");
        loop {
            let lease = json!({
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self.name()},
                "spec": {
                    "holderIdentity": self.name(),
                    "leaseDurationSeconds": 40,
                    "renewTime": format!("{:.6}", Timestamp::now()),
                },
            });
            let params = PatchParams::apply("kubelet").force();
            if let Err(error) = leases.patch(&self.name(), &params, &Patch::Apply(lease)).await {
                warn!(node = self.name(), %error, "the lease was not renewed");
            }
            sleep(LEASE_INTERVAL).await;
        }
    }

    /// Runs a pod until it is deleted.
    pub async fn run_pod(self, mut pod: watch::Receiver<Pod>) {
        let first = pod.borrow_and_update().clone();
        let name = first.metadata.name.clone().unwrap_or_default();
        let labels = first.metadata.labels.clone().unwrap_or_default();
        let ran = if labels
            .get("kubevirt.io")
            .is_some_and(|value| value == "virt-launcher")
        {
            self.run_launcher(&first, &mut pod).await
        } else if labels
            .get("app.kubernetes.io/name")
            .is_some_and(|value| value == "husk-agent")
        {
            self.run_agent(&first, &mut pod).await
        } else {
            Ok(())
        };
        match ran {
            Ok(()) => info!(node = self.name(), pod = name, "the pod has ended"),
            Err(error) => warn!(node = self.name(), pod = name, "{error:#}"),
        }
    }

    /// A launcher pod: its shim, until the VM has ended or the pod is deleted.
    async fn run_launcher(&self, first: &Pod, pod: &mut watch::Receiver<Pod>) -> Result<()> {
        let uid = first.metadata.uid.clone().context("no UID")?;
        let shim = Shim::start(&self.dir.join("run"), &uid);
        self.write_status(first, running(first, &self.address())).await;
        let mut status = shim.status();
        let deleted = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
        tokio::select! {
            _ = status.wait_for(|status| status.stopping || status.phase() == Phase::Failed) => {}
            _ = pod.wait_for(deleted) => {}
        }
        if shim.status().borrow().phase() != Phase::Failed {
            sleep(POWER_OFF).await;
            shim.end(Phase::Succeeded, "Poweroff");
        }
        self.write_status(first, ended(first, &self.address())).await;
        // The watch ends with the pod.
        let _ = pod.wait_for(deleted).await;
        self.delete(first).await
    }

    /// The agent's pod: its program as a process of this machine, until the pod is deleted.
    async fn run_agent(&self, first: &Pod, pod: &mut watch::Receiver<Pod>) -> Result<()> {
        let devices = DeviceManager::default();
        devices.start(&self.dir.join("plugins"));
        let kubeconfig = self.kubeconfig(first).await?;
        let log = std::fs::File::create(self.dir.join("agent.log"))?;
        let at = |name: &str| self.dir.join(name);
        let port = |base: u32| format!("127.0.0.1:{}", base + self.number);
        let mut command = Command::new(&self.agent);
        command
            .env("KUBECONFIG", kubeconfig)
            .args(["--node-name", &self.name()])
            .args([
                "--rest-address",
                &port(28_100),
                "--metrics-address",
                &port(28_300),
            ]);
        for (option, directory) in [
            ("--device-plugin-dir", "plugins"),
            ("--runtime-dir", "run"),
            ("--pods-dir", "pods"),
            ("--pod-logs-dir", "logs"),
            ("--versions-dir", "versions"),
            ("--certificate-dir", "certificates"),
        ] {
            command.arg(option).arg(at(directory));
        }
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true);
        let mut agent = command.spawn().context("cannot start husk-agent")?;
        let pid = agent.id().context("husk-agent has ended")?;
        std::fs::write(at("agent.pid"), pid.to_string())?;
        self.write_status(first, running(first, &self.address())).await;
        let publish = self.publish_devices(&devices);
        tokio::pin!(publish);
        let mut published = false;
        loop {
            tokio::select! {
                result = &mut publish, if !published => { result?; published = true; }
                status = agent.wait() => anyhow::bail!("husk-agent has ended: {}", status?),
                _ = pod.wait_for(|pod| pod.metadata.deletion_timestamp.is_some()) => break,
            }
        }
        agent.kill().await?;
        self.delete(first).await
    }

    /// Publishes the registered devices in the Node, and then follows their lists.
    async fn publish_devices(&self, devices: &DeviceManager) -> Result<()> {
        while devices.registrations().len() < DEVICES {
            sleep(Duration::from_millis(100)).await;
        }
        let mut resources = serde_json::Map::new();
        let mut lists = Vec::new();
        for plugin in devices.registrations() {
            let mut client = connect(self.dir.join("plugins").join(&plugin.endpoint)).await;
            let mut list = client.list_and_watch(api::Empty {}).await?.into_inner();
            let first = list.message().await?.context("no list of devices")?;
            // This machine need not have the devices.
            resources.insert(plugin.resource_name, json!(first.devices.len().to_string()));
            lists.push(list);
        }
        let patch = json!({"status": {"capacity": resources, "allocatable": resources}});
        let nodes: Api<Node> = Api::all(self.client.clone());
        nodes
            .patch_status(&self.name(), &PatchParams::default(), &Patch::Merge(patch))
            .await?;
        for mut list in lists {
            tokio::spawn(async move { while let Ok(Some(_)) = list.message().await {} });
        }
        Ok(())
    }

    /// Writes a kubeconfig with a token of the pod's account that is bound to the pod, as the kubelet's are.
    async fn kubeconfig(&self, pod: &Pod) -> Result<PathBuf> {
        let metadata = &pod.metadata;
        let namespace = metadata.namespace.as_deref().context("no namespace")?;
        let account = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.service_account_name.as_deref())
            .context("no account")?;
        let request: TokenRequest = serde_json::from_value(json!({
            "metadata": {},
            "spec": {
                "audiences": [],
                "expirationSeconds": 86_400,
                "boundObjectRef": {
                    "apiVersion": "v1", "kind": "Pod", "name": metadata.name, "uid": metadata.uid,
                },
            },
        }))?;
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), namespace);
        let answer = accounts
            .create_token_request(account, &PostParams::default(), &request)
            .await?;
        let token = answer.status.context("no token")?.token;
        let mut config = serde_json::to_value(Kubeconfig::read()?)?;
        config["users"] = json!([{"name": account, "user": {"token": token}}]);
        config["contexts"][0]["context"]["user"] = json!(account);
        let path = self.dir.join("agent.kubeconfig");
        std::fs::write(&path, config.to_string())?;
        Ok(path)
    }

    /// Writes the status of a pod; tries until it succeeds or the pod is gone.
    async fn write_status(&self, pod: &Pod, status: Value) {
        let pods = self.pods(pod);
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let patch = Patch::Strategic(json!({"status": status}));
        while let Err(error) = pods.patch_status(name, &PatchParams::default(), &patch).await {
            if matches!(&error, kube::Error::Api(status) if status.code == 404) {
                return;
            }
            warn!(pod = name, %error, "the status was not written");
            sleep(RETRY).await;
        }
    }

    async fn delete(&self, pod: &Pod) -> Result<()> {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let params = DeleteParams::default().grace_period(0);
        match self.pods(pod).delete(name, &params).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            result => result.map(drop).context("the pod was not deleted"),
        }
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        Api::namespaced(self.client.clone(), namespace)
    }
}

/// Status of a pod whose containers run.
fn running(pod: &Pod, host: &str) -> Value {
    let now = Timestamp::now().to_string();
    let state = json!({"running": {"startedAt": now}});
    let conditions = ["PodScheduled", "Initialized", "ContainersReady", "Ready"];
    let conditions =
        conditions.map(|kind| json!({"type": kind, "status": "True", "lastTransitionTime": now}));
    json!({
        "phase": "Running",
        "startTime": now,
        "hostIP": host,
        "podIP": "10.250.0.1",
        "podIPs": [{"ip": "10.250.0.1"}],
        "conditions": conditions,
        "containerStatuses": containers(pod, true, &state),
    })
}

/// Status of a pod whose containers have ended.
fn ended(pod: &Pod, host: &str) -> Value {
    let now = Timestamp::now().to_string();
    let state = json!({"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": now}});
    let conditions = ["ContainersReady", "Ready"];
    let conditions = conditions.map(
        |kind| json!({"type": kind, "status": "False", "reason": "PodCompleted", "lastTransitionTime": now}),
    );
    json!({
        "phase": "Succeeded",
        "hostIP": host,
        "conditions": conditions,
        "containerStatuses": containers(pod, false, &state),
    })
}

/// Status of the main containers.
fn containers(pod: &Pod, ready: bool, state: &Value) -> Vec<Value> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let status = |name: &str, image: Option<&String>| {
        json!({
            "name": name,
            "image": image,
            "imageID": "",
            "ready": ready,
            "started": ready,
            "restartCount": 0,
            "state": state,
        })
    };
    containers
        .map(|container| status(&container.name, container.image.as_ref()))
        .collect()
}
