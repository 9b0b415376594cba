//! The cluster of `cargo xtask cluster`, whose clients run on this machine.

use super::context::{CommandResult, TestContext};
use super::guest::Shell;
use super::program::Session;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Maximum time of a client's command.
const CALL: Duration = Duration::from_secs(60);
/// Maximum time for the cluster to reach a state: a guest's boot, an attachment pod.
const CHANGE: Duration = Duration::from_secs(180);
/// Image of a small guest's kernel and initramfs.
const GUEST: &str = "localhost/husk/guest:6.12";
/// Image of the nodes' sandboxes, which has a busybox.
const PAUSE: &str = "localhost/husk/pause:1";
/// Resource of VMIs.
pub const VMI: &str = "vmi";

/// The cluster.
#[derive(Debug)]
pub struct KubeVirt<'s> {
    ctx: &'s TestContext,
    folder: PathBuf,
}

impl<'s> KubeVirt<'s> {
    /// The cluster that `HUSK_CLUSTER` names.
    pub fn find(ctx: &'s TestContext) -> Result<Self> {
        let folder = std::env::var_os("HUSK_CLUSTER").context("HUSK_CLUSTER is not set")?;
        Ok(Self {
            ctx,
            folder: folder.into(),
        })
    }

    fn client(&self, name: &str, words: &[&str]) -> Command {
        let mut command = Command::new(self.folder.join(name));
        let kubeconfig = self.folder.join("certificates/admin.kubeconfig");
        command.args(words).env("KUBECONFIG", kubeconfig);
        command
    }

    /// Runs `kubectl` until it ends.
    pub fn kubectl(&self, words: &[&str]) -> Result<CommandResult> {
        self.ctx.finish(self.client("kubectl", words), CALL)
    }

    /// Runs `virtctl` until it ends.
    pub fn virtctl(&self, words: &[&str]) -> Result<CommandResult> {
        self.ctx.finish(self.client("virtctl", words), CALL)
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
        let deadline = Instant::now() + CHANGE;
        loop {
            let seen = self.field(kind, name, path)?;
            if seen == value {
                return Ok(());
            }
            if Instant::now() > deadline {
                let events = self.kubectl(&["get", "events", "--sort-by=.lastTimestamp"])?.text;
                bail!(
                    "{path} of {kind} {name} is {seen:?} and not {value:?} after {} s:\n{events}",
                    CHANGE.as_secs()
                );
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Waits until the VMI `name` is another than the one with the UID `old`, and runs.
    pub fn until_replaced(&self, name: &str, old: &str) -> Result<()> {
        let deadline = Instant::now() + CHANGE;
        loop {
            let uid = self.field(VMI, name, ".metadata.uid")?;
            if !uid.is_empty() && uid != old {
                return self.until(VMI, name, ".status.phase", "Running");
            }
            if Instant::now() > deadline {
                bail!("the VMI {name} is not replaced after {} s", CHANGE.as_secs());
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Waits until the list of a namespaced kind is empty.
    pub fn until_none(&self, kind: &str) -> Result<()> {
        let deadline = Instant::now() + CHANGE;
        loop {
            let left = self.kubectl(&["get", kind, "-o", "name"])?.ok()?;
            if left.trim().is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("still there: {left}");
            }
            std::thread::sleep(Duration::from_secs(1));
        }
    }

    /// Waits until an object has events with each of `messages`.
    pub fn until_events(&self, name: &str, messages: &[&str]) -> Result<()> {
        let object = format!("involvedObject.name={name}");
        let selector = ["--field-selector", &object, "-o", "jsonpath={.items[*].message}"];
        let deadline = Instant::now() + CALL;
        loop {
            let words = [&["get", "events"][..], &selector].concat();
            let events = self.kubectl(&words)?.ok()?;
            let missing = messages.iter().find(|message| !events.contains(**message));
            let Some(missing) = missing else {
                return Ok(());
            };
            ensure!(Instant::now() < deadline, "no event {missing:?}: {events}");
            std::thread::sleep(Duration::from_secs(1));
        }
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

    /// Powers a guest off from its console, which ends then.
    pub fn power_off(&self, name: &str) -> Result<()> {
        let console = self.console(name)?;
        log_in(&console)?.send("poweroff -f")?;
        console.wait(CHANGE).map(drop)
    }

    /// Runs a shell command on the node, by a privileged pod that stays for the next command.
    pub fn on_node(&self, command: &str) -> Result<String> {
        if self.field("pod", "node-shell", ".metadata.name")?.is_empty() {
            self.apply(&[node_shell()])?;
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
        self.kubectl(&chroot)?.ok()
    }
}

/// The shell on a console; its prompt may have been printed before.
fn log_in(console: &Session) -> Result<Shell<'_>> {
    console.expect("Successfully connected", CALL)?;
    console.send("\n")?;
    Shell::small_on(console)
}

/// A pod with the node's filesystem at `/host`.
fn node_shell() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "node-shell"},
        "spec": {
            "hostPID": true,
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "shell",
                "image": PAUSE,
                "command": ["/bin/busybox", "sleep", "1000000000"],
                "securityContext": {"privileged": true},
                "volumeMounts": [{"name": "host", "mountPath": "/host"}],
            }],
            "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        },
    })
}

/// A VirtualMachine with a small guest that does the words `words`.
pub fn virtual_machine(name: &str, words: &str) -> Value {
    let container = json!({
        "image": GUEST,
        "imagePullPolicy": "IfNotPresent",
        "kernelPath": "/boot/vmlinuz",
        "initrdPath": "/boot/initrd",
    });
    let arguments = format!("console=ttyS0 quiet husk.do={words}");
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": name},
        "spec": {
            "runStrategy": "Always",
            "template": {
                "metadata": {"labels": {"husk.io/runtime": "true"}},
                "spec": {
                    "terminationGracePeriodSeconds": 60,
                    "domain": {
                        "memory": {"guest": "128Mi"},
                        "firmware": {"kernelBoot": {"kernelArgs": arguments, "container": container}},
                        "devices": {"interfaces": [{"name": "default", "masquerade": {}}]},
                    },
                    "networks": [{"name": "default", "pod": {}}],
                },
            },
        },
    })
}
