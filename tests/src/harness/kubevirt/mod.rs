//! The cluster of `cargo xtask cluster`, whose clients run on this machine.

pub mod objects;

use super::context::{CommandResult, TestContext};
use super::guest::Shell;
use super::program::Session;
use super::{met, poll};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Maximum time of a client's command.
const CALL: Duration = Duration::from_secs(60);
/// Maximum time for the cluster to reach a state: a guest's boot, an attachment pod.
const CHANGE: Duration = Duration::from_secs(180);
/// Resource of VMIs.
pub const VMI: &str = "vmi";

/// The cluster.
#[derive(Debug)]
pub struct KubeVirt<'s> {
    ctx: &'s TestContext,
    folder: PathBuf,
    /// Namespace of the clients' commands.
    namespace: String,
}

impl<'s> KubeVirt<'s> {
    /// The cluster that `HUSK_CLUSTER` names, and its namespace `default`.
    pub fn find(ctx: &'s TestContext) -> Result<Self> {
        let folder = std::env::var_os("HUSK_CLUSTER").context("HUSK_CLUSTER is not set")?;
        Ok(Self {
            ctx,
            folder: folder.into(),
            namespace: "default".to_owned(),
        })
    }

    /// The same cluster and another namespace.
    pub fn in_namespace(&self, namespace: &str) -> Self {
        Self {
            ctx: self.ctx,
            folder: self.folder.clone(),
            namespace: namespace.to_owned(),
        }
    }

    /// Path of a file in the cluster's folder, which the nodes see too.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Name of the first node.
    pub fn node(&self) -> Result<String> {
        self.field("nodes", "-lhusk.io/node", ".items[0].metadata.name")
    }

    fn client(&self, name: &str, words: &[&str]) -> Command {
        let mut command = Command::new(self.folder.join(name));
        let kubeconfig = self.folder.join("certificates/admin.kubeconfig");
        command
            .args(["--namespace", &self.namespace])
            .args(words)
            .env("KUBECONFIG", kubeconfig);
        command
    }

    /// Runs `kubectl` until it ends.
    pub fn kubectl(&self, words: &[&str]) -> Result<CommandResult> {
        self.ctx.finish(self.client("kubectl", words), CALL)
    }

    /// Runs `kubectl` with a bearer token in place of the administrator's certificate.
    pub fn kubectl_as(&self, token: &str, words: &[&str]) -> Result<CommandResult> {
        let server = self.kubectl(&["config", "view", "-o", "jsonpath={.clusters[0].cluster.server}"])?;
        let authority = self.folder.join("certificates/ca.crt");
        let mut command = Command::new(self.folder.join("kubectl"));
        command
            .args([
                "--kubeconfig=/dev/null",
                "--server",
                &server.ok()?,
                "--token",
                token,
            ])
            .arg("--certificate-authority")
            .arg(authority)
            .args(words);
        self.ctx.finish(command, CALL)
    }

    /// Starts `kubectl`, whose output is also in its log.
    pub fn kubectl_session(&self, words: &[&str]) -> Result<Session> {
        Session::piped(self.client("kubectl", words), &self.ctx.log("kubectl.log"))
    }

    /// Runs `virtctl` until it ends.
    pub fn virtctl(&self, words: &[&str]) -> Result<CommandResult> {
        self.ctx.finish(self.client("virtctl", words), CALL)
    }

    /// Starts `virtctl`, whose output is also in its log.
    pub fn virtctl_session(&self, words: &[&str]) -> Result<Session> {
        Session::piped(self.client("virtctl", words), &self.ctx.log("virtctl.log"))
    }

    /// `kubectl apply` of objects.
    pub fn apply(&self, objects: &[Value]) -> Result<()> {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        let file = self.ctx.path("objects.json");
        std::fs::write(&file, list.to_string())?;
        self.kubectl(&["apply", "-f", &file.display().to_string()])?
            .ok()
            .map(drop)
    }

    /// `kubectl patch` with more options.
    pub fn patch(&self, kind: &str, name: &str, options: &[&str], patch: &Value) -> Result<()> {
        let patch = patch.to_string();
        let words = [&["patch", kind, name, "-p", &patch], options].concat();
        self.kubectl(&words)?.ok().map(drop)
    }

    /// `kubectl delete`, without waiting for the end.
    pub fn delete(&self, kind: &str, name: &str) -> Result<()> {
        let words = ["delete", kind, name, "--wait=false", "--ignore-not-found"];
        self.kubectl(&words)?.ok().map(drop)
    }

    /// Value at the JSONPath `path`; empty if there is no such object.
    pub fn field(&self, kind: &str, name: &str, path: &str) -> Result<String> {
        let path = format!("jsonpath={{{path}}}");
        let words = ["get", kind, name, "--ignore-not-found", "-o", &path];
        self.kubectl(&words)?.ok()
    }

    /// Waits until the value at the JSONPath `path` is `value`.
    pub fn until(&self, kind: &str, name: &str, path: &str, value: &str) -> Result<()> {
        let what = format!("{path} of {kind} {name} is not {value:?}");
        self.until_true(&what, || {
            let seen = self.field(kind, name, path)?;
            met(seen == value, || seen)
        })
    }

    /// Waits until the condition `condition` has the status `status`; without the condition that is "".
    pub fn until_condition(&self, kind: &str, name: &str, condition: &str, status: &str) -> Result<()> {
        self.until(kind, name, &objects::condition(condition, "status"), status)
    }

    /// Waits until `check` does not return what it sees instead; `what` is the error if it always does.
    pub fn until_true(&self, what: &str, check: impl Fn() -> Result<Result<(), String>>) -> Result<()> {
        let deadline = Instant::now() + CHANGE;
        loop {
            let Err(seen) = check()? else {
                return Ok(());
            };
            if Instant::now() > deadline {
                let events = self.kubectl(&["get", "events", "--sort-by=.lastTimestamp"])?.text;
                bail!("{what} after {} s but {seen:?}:\n{events}", CHANGE.as_secs());
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Waits until the VMI `name` is another than the one with the UID `old`, and runs.
    pub fn until_replaced(&self, name: &str, old: &str) -> Result<()> {
        self.until_true(&format!("the VMI {name} is not replaced"), || {
            let uid = self.field(VMI, name, ".metadata.uid")?;
            met(!(uid.is_empty() || uid == old), || uid)
        })?;
        self.until(VMI, name, ".status.phase", "Running")
    }

    /// Waits until the list of a namespaced kind is empty.
    pub fn until_none(&self, kind: &str) -> Result<()> {
        self.until_true(&format!("there are {kind}"), || {
            let left = self.kubectl(&["get", kind, "-o", "name"])?.ok()?;
            let left = left.trim();
            met(left.is_empty(), || left.to_owned())
        })
    }

    /// Waits until no VMI and then no pod is left.
    pub fn until_no_guests(&self) -> Result<()> {
        self.until_none(VMI)?;
        self.until_none("pods")
    }

    /// Deletes objects, given by kind and name.
    pub fn delete_all(&self, objects: &[(&str, &str)]) -> Result<()> {
        objects
            .iter()
            .try_for_each(|(kind, name)| self.delete(kind, name))
    }

    /// Waits until an object has events with each of `messages`.
    pub fn until_events(&self, name: &str, messages: &[&str]) -> Result<()> {
        let object = format!("involvedObject.name={name}");
        let selector = ["--field-selector", &object, "-o", "jsonpath={.items[*].message}"];
        let words = [&["get", "events"][..], &selector].concat();
        poll(CALL, Duration::from_secs(1), || {
            let events = self.kubectl(&words)?.ok()?;
            let missing = messages.iter().find(|message| !events.contains(**message));
            Ok(missing.map_or(Ok(()), |missing| Err(format!("no event {missing:?}: {events}"))))
        })
    }

    /// `virtctl console` of a VMI.
    pub fn console(&self, name: &str) -> Result<Session> {
        let log = self.ctx.log(&format!("{name}.console.log"));
        Session::on_terminal(self.client("virtctl", &["console", name]), &log)
    }

    /// Runs `use_shell` with a shell on the console of a VMI, and leaves the console.
    pub fn in_guest<T>(&self, name: &str, use_shell: impl FnOnce(&Shell<'_>) -> Result<T>) -> Result<T> {
        let console = self.console(name)?;
        let result = use_shell(&log_in(&console)?)?;
        // The shell for the next session has a prompt.
        console.send("exec sh\n")?;
        let deadline = Instant::now() + CALL;
        // virtctl takes ^] only as the first byte of what it reads at once.
        while console.ended()?.is_none() {
            ensure!(Instant::now() < deadline, "^] does not end virtctl console");
            std::thread::sleep(Duration::from_millis(500));
            // It may have ended meanwhile.
            let _ = console.send("\x1d");
        }
        Ok(result)
    }

    /// Runs a command by [`KubeVirt::in_guest`], which must succeed.
    pub fn guest_does(&self, name: &str, command: &str) -> Result<()> {
        self.in_guest(name, |shell| shell.ok(command).map(drop))
    }

    /// Powers a guest off from its console, which ends then.
    pub fn power_off(&self, name: &str) -> Result<()> {
        let console = self.console(name)?;
        log_in(&console)?.send("poweroff -f")?;
        console.wait(CHANGE).map(drop)
    }

    /// Pauses a VMI and resumes it.
    pub fn pause_and_resume(&self, name: &str) -> Result<()> {
        let reason = objects::condition("Paused", "reason");
        self.virtctl(&["pause", "vmi", name])?.ok()?;
        self.until(VMI, name, &reason, "PausedByUser")?;
        self.virtctl(&["unpause", "vmi", name])?.ok()?;
        self.until(VMI, name, &reason, "")
    }

    /// Runs a shell command on the node, by a privileged pod that stays for the next command.
    pub fn on_node(&self, command: &str) -> Result<String> {
        self.on_node_within(command, CALL)
    }

    /// As [`KubeVirt::on_node`], for a command that may take up to `limit`.
    pub fn on_node_within(&self, command: &str, limit: Duration) -> Result<String> {
        if self.field("pod", "node-shell", ".metadata.name")?.is_empty() {
            self.apply(&[objects::node_shell()])?;
            self.until("pod", "node-shell", ".status.phase", "Running")?;
        }
        let chroot = [
            "exec",
            "node-shell",
            "--",
            "/bin/busybox",
            "chroot",
            "/host",
            "/bin/sh",
            "-c",
            command,
        ];
        self.ctx.finish(self.client("kubectl", &chroot), limit)?.ok()
    }
}

/// The shell on a console; its prompt may have been printed before.
fn log_in(console: &Session) -> Result<Shell<'_>> {
    console.expect("Successfully connected", CALL)?;
    console.send("\n")?;
    Shell::small_on(console)
}
