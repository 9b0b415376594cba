//! The guest's agent under KubeVirt: what `kubectl` and `virtctl` show, probes, freezing, access credentials.

use crate::cases::guest_agent::{FIRST_KEY, SECOND_KEY};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::kubevirt::objects::{DISK, condition, instance};
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met};
use anyhow::{Result, ensure};
use serde_json::{Value, json};

pub const CASE: Case = Case {
    name: "kubevirt-guest-agent",
    about: "a guest with qemu-ga: conditions, guestosinfo, userlist, fslist, probes, freeze, virt-freezer, SSH keys of a Secret",
    limit: std::time::Duration::from_secs(1500),
    run,
};

const VM: &str = "agent";
const PINGED: &str = "pinged";
const SECRET: &str = "agent-keys";
const CONNECTED: &str = "AgentConnected";
const READY: &str = "Ready";
const FROZEN: &str = ".status.fsFreezeStatus";
/// Makes the account for which the agent writes keys, and mounts a file system that it can freeze.
const SETUP: &str = "mkdir -p /etc /root /mnt && echo root:x:0:0::/root:/bin/sh > /etc/passwd && \
                     mount -t ext4 /dev/vda /mnt";

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    c.apply(&[keys(&[FIRST_KEY]), vmi()])?;
    c.until(VMI, VM, ".status.phase", "Running")?;
    c.until_condition(VMI, VM, CONNECTED, "True")?;
    c.guest_does(VM, SETUP)?;
    ctx.part("views", || views(c));
    ctx.part("a readiness probe by exec", || readiness(c));
    ctx.part("freeze", || freeze(ctx, c));
    ctx.part("virt-freezer", || freezer(c));
    ctx.part("an agent of the node that is replaced while frozen", || {
        replaced(ctx, c)
    });
    ctx.part("SSH keys", || ssh_keys(c));
    ctx.part("the agent goes and comes back", || gone_and_back(c));
    c.delete(VMI, VM)?;
    c.delete("secret", SECRET)?;
    ctx.part("probes by HTTP and by ping", || liveness(c));
    c.delete(VMI, PINGED)?;
    c.until_no_guests()
}

/// A VMI with a disk, probes by exec and TCP, and the keys of the Secret.
fn vmi() -> Value {
    let mut vmi = instance(VM, "script,disks,agent,shell");
    let spec = &mut vmi["spec"];
    spec["domain"]["memory"]["guest"] = json!("192Mi");
    spec["domain"]["devices"]["disks"] = json!([{"name": "data", "disk": {"bus": "virtio"}}]);
    spec["volumes"] =
        json!([{"name": "data", "containerDisk": {"image": DISK, "imagePullPolicy": "IfNotPresent"}}]);
    spec["readinessProbe"] = json!({
        "exec": {"command": ["/bin/busybox", "test", "-e", "/ready"]},
        "periodSeconds": 3, "timeoutSeconds": 5, "failureThreshold": 1,
    });
    spec["livenessProbe"] = json!({"tcpSocket": {"port": 80}, "periodSeconds": 5, "failureThreshold": 20});
    spec["accessCredentials"] = json!([{"sshPublicKey": {
        "source": {"secret": {"secretName": SECRET}},
        "propagationMethod": {"qemuGuestAgent": {"users": ["root"]}},
    }}]);
    vmi
}

fn keys(keys: &[&str]) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET},
        "stringData": {"authorized": keys.join("\n")},
    })
}

fn views(c: &KubeVirt<'_>) -> Result<()> {
    // A session that is not the first begins with output of the shell.
    let said = c.in_guest(VM, |shell| shell.ok("uname -r"))?;
    let release = said.trim().lines().last().unwrap_or_default();
    c.until(VMI, VM, ".status.guestOSInfo.kernelRelease", release)?;
    c.until(VMI, VM, ".status.interfaces[0].infoSource", "domain, guest-agent")?;
    let name = c.field(VMI, VM, ".status.interfaces[0].interfaceName")?;
    ensure!(name == "eth0", "interfaceName {name:?}");
    // Masquerade: the pod's address, not the guest's.
    let pod = c.field("pods", "-lkubevirt.io=virt-launcher", ".items[0].status.podIP")?;
    let shown = c.field(VMI, VM, ".status.interfaces[0].ipAddress")?;
    ensure!(shown == pod, "{shown}, not {pod}");
    let unsupported = condition("AgentVersionNotSupported", "reason");
    ensure!(
        c.field(VMI, VM, &unsupported)?.is_empty(),
        "the agent is not supported"
    );
    let info = c.virtctl(&["guestosinfo", VM])?.ok()?;
    let info: Value = serde_json::from_str(&info)?;
    ensure!(info["os"]["kernelRelease"] == release, "{info}");
    ensure!(
        info["fsFreezeStatus"] == "thawed" && info["guestAgentVersion"].is_string(),
        "{info}"
    );
    let commands = info["supportedCommands"].as_array().map(Vec::len);
    ensure!(commands.is_some_and(|commands| commands > 20), "{info}");
    c.virtctl(&["userlist", VM])?.says(&["items"])?;
    c.until_true("the mounted file system is not listed", || {
        let listed = c.virtctl(&["fslist", VM])?.ok()?;
        met(listed.contains("\"/mnt\""), || listed)
    })
}

fn readiness(c: &KubeVirt<'_>) -> Result<()> {
    c.until_condition(VMI, VM, READY, "False")?;
    c.guest_does(VM, "touch /ready")?;
    c.until_condition(VMI, VM, READY, "True")?;
    c.guest_does(VM, "rm /ready")?;
    c.until_condition(VMI, VM, READY, "False")
}

/// A PUT of a subresource, for which virtctl has no command.
fn put(ctx: &TestContext, c: &KubeVirt<'_>, operation: &str, body: &Value) -> Result<()> {
    let path = format!(
        "/apis/subresources.kubevirt.io/v1/namespaces/default/virtualmachineinstances/{VM}/{operation}"
    );
    let file = ctx.path("body.json");
    std::fs::write(&file, body.to_string())?;
    let words = ["replace", "--raw", &path, "-f", &file.display().to_string()];
    c.kubectl(&words)?.ok().map(drop)
}

fn freeze(ctx: &TestContext, c: &KubeVirt<'_>) -> Result<()> {
    let minute = json!({"unfreezeTimeout": "1m0s"});
    put(ctx, c, "freeze", &minute)?;
    c.until(VMI, VM, FROZEN, "frozen")?;
    put(ctx, c, "unfreeze", &json!({}))?;
    c.until(VMI, VM, FROZEN, "")?;
    c.guest_does(VM, "echo after > /mnt/after && sync")?;
    // A thaw that is forgotten.
    put(ctx, c, "freeze", &json!({"unfreezeTimeout": "10s"}))?;
    c.until(VMI, VM, FROZEN, "frozen")?;
    c.until(VMI, VM, FROZEN, "")
}

/// Velero runs this program in `compute` before and after a backup.
fn freezer(c: &KubeVirt<'_>) -> Result<()> {
    let pod = c.field("pods", "-lkubevirt.io=virt-launcher", ".items[0].metadata.name")?;
    let run = |action: &str| {
        let words = [
            "exec",
            &pod,
            "-c",
            "compute",
            "--",
            "/usr/bin/virt-freezer",
            action,
            "--name",
            VM,
            "--namespace",
            "default",
        ];
        c.kubectl(&words)
    };
    run("--freeze")?.ok()?;
    c.until(VMI, VM, FROZEN, "frozen")?;
    run("--unfreeze")?.ok()?;
    c.until(VMI, VM, FROZEN, "")?;
    expect_contains(
        &run("--melt")?.text,
        &["either --freeze or --unfreeze must be set"],
    )
    .map(drop)
}

fn replaced(ctx: &TestContext, c: &KubeVirt<'_>) -> Result<()> {
    put(ctx, c, "freeze", &json!({"unfreezeTimeout": "15s"}))?;
    c.until(VMI, VM, FROZEN, "frozen")?;
    let kubevirt = c.in_namespace("kubevirt");
    let words = [
        "delete",
        "pod",
        "-lapp.kubernetes.io/name=husk-agent",
        "--grace-period=0",
        "--force",
    ];
    kubevirt.kubectl(&words)?.ok()?;
    c.until(VMI, VM, FROZEN, "")?;
    c.guest_does(VM, "echo again > /mnt/again && sync")
}

fn ssh_keys(c: &KubeVirt<'_>) -> Result<()> {
    let has = |key: &str| {
        c.until_true("the guest does not have the key", || {
            let keys = c.in_guest(VM, |shell| shell.ok("cat /root/.ssh/authorized_keys || true"))?;
            met(keys.contains(key), || keys)
        })
    };
    has(FIRST_KEY)?;
    c.until_condition(VMI, VM, "AccessCredentialsSynchronized", "True")?;
    c.apply(&[keys(&[FIRST_KEY, SECOND_KEY])])?;
    has(SECOND_KEY)?;
    c.until_events(VM, &["Access credentials sync successful."])
}

fn gone_and_back(c: &KubeVirt<'_>) -> Result<()> {
    c.guest_does(VM, "kill $(cat /run/qemu-ga.pid)")?;
    c.until_condition(VMI, VM, CONNECTED, "")?;
    c.virtctl(&["guestosinfo", VM])?
        .fails_with(1, &["VMI does not have guest agent connected"])?;
    let start = "qemu-ga --daemonize --pidfile /run/qemu-ga.pid --statedir /run";
    c.guest_does(VM, start)?;
    c.until_condition(VMI, VM, CONNECTED, "True")
}

/// The VMI of a guest that serves HTTP is ready; that of a guest whose agent does not answer ends.
fn liveness(c: &KubeVirt<'_>) -> Result<()> {
    let mut vmi = instance(PINGED, "script,agent,shell");
    vmi["spec"]["readinessProbe"] = json!({"httpGet": {"port": 80, "path": "/boot-id"}, "periodSeconds": 3});
    vmi["spec"]["domain"]["memory"]["guest"] = json!("192Mi");
    vmi["spec"]["terminationGracePeriodSeconds"] = json!(5);
    vmi["spec"]["livenessProbe"] = json!({
        "guestAgentPing": {}, "periodSeconds": 3, "timeoutSeconds": 5, "failureThreshold": 10,
    });
    c.apply(&[vmi])?;
    c.until_condition(VMI, PINGED, READY, "True")?;
    c.until_condition(VMI, PINGED, CONNECTED, "True")?;
    // Longer than the probe's timeout.
    std::thread::sleep(std::time::Duration::from_secs(45));
    c.until(VMI, PINGED, ".status.phase", "Running")?;
    c.in_guest(PINGED, |shell| {
        shell.send("(sleep 3; kill $(cat /run/qemu-ga.pid)) &")
    })?;
    c.until_true("the VMI goes on without its agent", || {
        let phase = c.field(VMI, PINGED, ".status.phase")?;
        let ended = matches!(phase.as_str(), "Failed" | "Succeeded");
        met(ended, || phase)
    })
}
