//! A cluster of one node: released etcd, API server and kubelet, with a case's own containerd.

use super::containerd::{self, Containerd};
use super::context::{CommandResult, TestContext};
use super::program::Session;
use super::{met, poll};
use crate::finish::finish;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Name of the node.
pub const NODE: &str = "node";
/// Eviction thresholds that never trigger: the disk of a test node may be full.
const NEVER: &str = "0%";
const ETCD: &str = "http://127.0.0.1:12379";
const API_PORT: u16 = 16443;
/// Group with all rights.
const TOKEN: &str = "husk-e2e";
/// Time limit for the API server, then for the node, to be ready.
const READY: Duration = Duration::from_secs(180);
/// Maximum time of a `kubectl` command that does not wait for a guest.
const CALL: Duration = Duration::from_secs(120);

/// A running cluster, which is ended when this is dropped.
#[derive(Debug)]
pub struct Cluster<'s> {
    ctx: &'s TestContext,
    programs: PathBuf,
    kubelet: Option<Session>,
    _api: Session,
    _etcd: Session,
}

impl<'s> Cluster<'s> {
    /// Starts the cluster and waits until its node is ready. The node uses `containerd` and has the labels `labels`.
    pub fn start(containerd: &Containerd<'s>, labels: &str) -> Result<Self> {
        let ctx = containerd.ctx();
        let programs = containerd::peers()?.join("kubernetes");
        let program = |name: &str| Command::new(programs.join(name));
        let folder = ctx.path("kubernetes");
        std::fs::create_dir_all(&folder)?;
        let mut cluster = Self {
            ctx,
            kubelet: None,
            _etcd: Session::piped(etcd(program("server"), &folder), &ctx.log("etcd.log"))?,
            _api: Session::piped(api(program("kube-apiserver"), &folder)?, &ctx.log("api.log"))?,
            programs: programs.clone(),
        };
        std::fs::write(cluster.kubeconfig(), kubeconfig().to_string())?;
        let ready = ["get", "--raw", "/readyz"];
        cluster.until("the API server", || Ok(cluster.kubectl(&ready)?.status == 0))?;
        let config = folder.join("kubelet.json");
        std::fs::write(&config, kubelet(&containerd.socket()).to_string())?;
        let mut command = program("kubelet");
        command
            .arg("--config")
            .arg(config)
            .arg("--kubeconfig")
            .arg(cluster.kubeconfig())
            .arg("--root-dir")
            .arg(folder.join("kubelet"))
            .arg("--cert-dir")
            .arg(folder.join("certificates"))
            .args(["--hostname-override", NODE, "--node-labels", labels]);
        cluster.kubelet = Some(Session::piped(command, &ctx.log("kubelet.log"))?);
        let condition = r#"{.status.conditions[?(@.type=="Ready")].status}"#;
        cluster.until("the node", || {
            Ok(cluster
                .field("node", NODE, condition)
                .is_ok_and(|is| is == "True"))
        })?;
        Ok(cluster)
    }

    fn kubeconfig(&self) -> PathBuf {
        self.ctx.path("kubernetes/kubeconfig")
    }

    /// A command of `kubectl`.
    pub fn kubectl_command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("kubectl"));
        command
            .args(words)
            .env("KUBECONFIG", self.kubeconfig())
            .env("HOME", self.ctx.path("kubernetes"));
        command
    }

    /// Runs a command of `kubectl` until it ends.
    pub fn kubectl(&self, words: &[&str]) -> Result<CommandResult> {
        self.ctx.finish(self.kubectl_command(words), CALL)
    }

    /// `kubectl apply` of one object, or of a file of objects, unchanged.
    pub fn apply(&self, name: &str, object: impl ToString) -> Result<()> {
        let file = self.ctx.path(&format!("kubernetes/{name}.yaml"));
        std::fs::write(&file, object.to_string())?;
        let words = ["apply", "-f", &file.display().to_string()];
        self.kubectl(&words)?.ok().map(drop)
    }

    /// The object that the API server would make of `object`, as JSON. Nothing is made.
    pub fn create_dry(&self, name: &str, object: impl ToString) -> Result<String> {
        let file = self.ctx.path(&format!("kubernetes/{name}.yaml"));
        std::fs::write(&file, object.to_string())?;
        let file = file.display().to_string();
        self.kubectl(&["create", "--dry-run=server", "-o", "json", "-f", &file])?
            .ok()
    }

    /// Value at the JSONPath `path` of an object, from `kubectl get`.
    pub fn field(&self, kind: &str, name: &str, path: &str) -> Result<String> {
        let answer = self.kubectl(&["get", kind, name, "-o", &format!("jsonpath={path}")])?;
        answer.ok()
    }

    /// Binds a volume and its claim, as the controllers of a larger cluster would.
    pub fn bind(&self, claim: &str, volume: &str) -> Result<()> {
        let uid = self.field("pvc", claim, "{.metadata.uid}")?;
        let size = self.field("pvc", claim, "{.spec.resources.requests.storage}")?;
        let bound = json!({"phase": "Bound", "capacity": {"storage": size}});
        let patches = [
            ("pv", volume, "", json!({"spec": {"claimRef": {"uid": uid}}})),
            ("pv", volume, "status", json!({"status": {"phase": "Bound"}})),
            ("pvc", claim, "status", json!({"status": bound})),
        ];
        for (kind, name, part, patch) in patches {
            self.patch(kind, name, &[&format!("--subresource={part}")], &patch)?;
        }
        Ok(())
    }

    /// `kubectl patch` with a merge patch and more options.
    pub fn patch(&self, kind: &str, name: &str, options: &[&str], patch: &Value) -> Result<()> {
        let patch = patch.to_string();
        let words = [&["patch", kind, name, "--type=merge", "-p", &patch], options].concat();
        self.kubectl(&words)?.ok().map(drop)
    }

    /// Messages of all events.
    pub fn events(&self) -> Result<String> {
        self.kubectl(&["get", "events", "-o", "jsonpath={.items[*].message}"])?
            .ok()
    }

    /// Removes the finalizers of an object.
    pub fn release(&self, kind: &str, name: &str) -> Result<()> {
        self.patch(kind, name, &[], &json!({"metadata": {"finalizers": null}}))
    }

    /// Waits until nothing of a pod is left on the node, and ends the cluster. The kubelet removes sandboxes at its own
    /// intervals.
    pub fn end_empty(self, containerd: &Containerd<'_>) -> Result<()> {
        let gone = self.until("an empty node", || Ok(containerd.nothing_left().is_ok()));
        gone.or_else(|_| containerd.nothing_left())?;
        self.end()
    }

    /// Waits until `is` returns true.
    pub fn until(&self, what: &str, is: impl Fn() -> Result<bool>) -> Result<()> {
        poll(READY, Duration::from_secs(1), || {
            met(is()?, || {
                format!("{what} is not ready after {} s", READY.as_secs())
            })
        })
    }

    /// Ends the cluster, once no pod is left, and removes the files that a kubelet leaves on its node.
    fn end(mut self) -> Result<()> {
        self.kubelet.take();
        for group in ["besteffort", "burstable", ""] {
            let cgroup = Path::new("/sys/fs/cgroup/kubepods").join(group);
            std::fs::remove_dir(&cgroup).with_context(|| format!("{} stays", cgroup.display()))?;
        }
        let table = std::fs::read_to_string("/proc/self/mountinfo")?;
        let own = self.ctx.path("kubernetes").display().to_string();
        let left: Vec<&str> = table.lines().filter(|line| line.contains(&own)).collect();
        ensure!(left.is_empty(), "still mounted: {left:?}");
        Ok(())
    }
}

fn etcd(mut command: Command, folder: &Path) -> Command {
    command
        .arg("--data-dir")
        .arg(folder.join("etcd"))
        .args(["--unsafe-no-fsync", "--log-level", "warn"])
        .args(["--listen-client-urls", ETCD, "--advertise-client-urls", ETCD])
        .args(["--listen-peer-urls", "http://127.0.0.1:12380"]);
    command
}

fn api(mut command: Command, folder: &Path) -> Result<Command> {
    let tokens = folder.join("tokens");
    std::fs::write(&tokens, format!("{TOKEN},admin,1,system:masters\n"))?;
    let key = folder.join("accounts");
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-q", "-t", "rsa", "-b", "2048", "-m", "PEM", "-N", "", "-f"]);
    finish(keygen.arg(&key))?;
    command
        .args(["--etcd-servers", ETCD, "--bind-address", "127.0.0.1"])
        .arg(format!("--secure-port={API_PORT}"))
        .arg("--cert-dir")
        .arg(folder.join("api"))
        .arg("--token-auth-file")
        .arg(tokens)
        .arg("--service-account-key-file")
        .arg(&key)
        .arg("--service-account-signing-key-file")
        .arg(&key)
        .args(["--service-account-issuer", "https://husk-e2e"])
        .args(["--service-cluster-ip-range", "10.96.0.0/24"])
        // There is no controller that creates service accounts.
        .args(["--disable-admission-plugins", "ServiceAccount"])
        .args(["--authorization-mode", "AlwaysAllow"])
        // The node's name cannot be resolved.
        .args(["--kubelet-preferred-address-types", "InternalIP"]);
    Ok(command)
}

/// Configuration for `kubectl` and the kubelet.
fn kubeconfig() -> Value {
    let server = format!("https://127.0.0.1:{API_PORT}");
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": NODE, "cluster": {"server": server, "insecure-skip-tls-verify": true}}],
        "users": [{"name": NODE, "user": {"token": TOKEN}}],
        "contexts": [{"name": NODE, "context": {"cluster": NODE, "user": NODE}}],
        "current-context": NODE,
    })
}

/// Configuration of the kubelet.
fn kubelet(containerd: &Path) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "containerRuntimeEndpoint": format!("unix://{}", containerd.display()),
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": NEVER, "imagefs.available": NEVER},
        "failSwapOn": false,
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": false,
    })
}
