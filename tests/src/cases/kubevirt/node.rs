//! The shim on a node: kept while it is in use, upgraded beside running VMs, removed with the label `leaving`.

use crate::harness::context::TestContext;
use crate::harness::kubevirt::objects::virtual_machine;
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kubevirt-node",
    about: "another pod of the agent, an upgrade of agent and shim with a VM running, a node that leaves and comes back",
    limit: Duration::from_secs(1500),
    run,
};

const OLD: &str = "old";
const NEW: &str = "new";
/// The same programs with another hash, in an archive that `cargo xtask cluster` makes.
const NEXT: &str = "localhost/husk/agent:next";
/// Time limit of the archive's import.
const IMPORT: Duration = Duration::from_secs(300);
/// More than the agent's delay before it removes the shim from a node without VMIs.
const REMOVAL: Duration = Duration::from_secs(50);
const AGENT: &str = "-lkubevirt.io=virt-handler";

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    let before = c.on_node("cat /etc/containerd/config.toml")?;
    c.apply(&[virtual_machine(OLD, "button,shell")])?;
    c.until(VMI, OLD, ".status.phase", "Running")?;
    let uid = c.field(VMI, OLD, ".metadata.uid")?;
    ctx.part("another pod of the agent", || same_programs(c));
    ctx.part("upgrade", || upgrade(c));
    ctx.part("the VM is the same and answers", || {
        ensure!(c.field(VMI, OLD, ".metadata.uid")? == uid, "another VMI");
        c.in_guest(OLD, |shell| shell.expect_contains("echo $((6 * 7))", &["42"]))
    });
    ctx.part("leave", || leave(c));
    ctx.part("come back", || come_back(c, &before));
    for name in [OLD, NEW] {
        c.delete("vm", name)?;
    }
    c.until_none(VMI)?;
    c.delete("pod", "node-shell")?;
    c.until_none("pods")
}

/// Waits until one agent runs whose pod is not `old`; returns its pod.
fn next_agent(c: &KubeVirt<'_>, old: &str) -> Result<String> {
    let agents = c.in_namespace("kubevirt");
    agents.until_true("there is no new agent", || {
        let ready = agents.field("pods", AGENT, ".items[*].status.containerStatuses[*].ready")?;
        let names = agents.field("pods", AGENT, ".items[*].metadata.name")?;
        let one = !names.contains(' ') && names != old;
        met(ready == "true" && one, || format!("{names} {ready}"))
    })?;
    agents.field("pods", AGENT, ".items[0].metadata.name")
}

/// Deletes the agent's pod; returns the log of the next one's init container.
fn replace_agent(c: &KubeVirt<'_>) -> Result<String> {
    let agents = c.in_namespace("kubevirt");
    let old = agents.field("pods", AGENT, ".items[0].metadata.name")?;
    agents.delete("pod", &old)?;
    let new = next_agent(c, &old)?;
    agents.kubectl(&["logs", &new, "-c", "install"])?.ok()
}

fn same_programs(c: &KubeVirt<'_>) -> Result<()> {
    let log = replace_agent(c)?;
    ensure!(
        log.contains("unchanged") && !log.contains("restarting") && !log.contains("created"),
        "{log}"
    );
    Ok(())
}

/// Versions of the programs on the node.
fn versions(c: &KubeVirt<'_>) -> Result<Vec<String>> {
    let versions = c.on_node("ls /opt/husk")?;
    Ok(versions.split_whitespace().map(str::to_owned).collect())
}

/// Version whose VMM is the newest process of its name.
fn version_of_newest_vmm(c: &KubeVirt<'_>) -> Result<String> {
    let path = c.on_node("readlink /proc/$(pgrep -n husk-vmm)/exe")?;
    path.split('/').nth(3).map(str::to_owned).context(path)
}

fn upgrade(c: &KubeVirt<'_>) -> Result<()> {
    let archive = c.path("images/agent-next.tar");
    let import = format!(
        "$(dirname $(readlink /proc/$(pgrep -x containerd)/exe))/ctr -n k8s.io images import {}",
        archive.display()
    );
    c.on_node_within(&import, IMPORT)?;
    let old = version_of_newest_vmm(c)?;
    ensure!(versions(c)? == [old.as_str()], "{:?}, not {old}", versions(c)?);
    let agents = c.in_namespace("kubevirt");
    let pod = agents.field("pods", AGENT, ".items[0].metadata.name")?;
    let image = format!("*={NEXT}");
    agents
        .kubectl(&["set", "image", "daemonset/husk-agent", &image])?
        .ok()?;
    next_agent(c, &pod)?;
    // The VM's own version stays for it; new VMs get the new one.
    let both = versions(c)?;
    ensure!(both.len() == 2 && both.contains(&old), "{both:?}");
    c.apply(&[virtual_machine(NEW, "button,shell")])?;
    c.until(VMI, NEW, ".status.phase", "Running")?;
    let new = version_of_newest_vmm(c)?;
    ensure!(new != old, "the new VM runs with {new}");
    for name in [OLD, NEW] {
        c.pause_and_resume(name)?;
    }
    Ok(())
}

fn leave(c: &KubeVirt<'_>) -> Result<()> {
    let node = c.node()?;
    c.kubectl(&["label", "--overwrite", "node", &node, "husk.io/node=leaving"])?
        .ok()?;
    c.until(
        "node",
        &node,
        ".metadata.labels.kubevirt\\.io/schedulable",
        "false",
    )?;
    c.virtctl(&["stop", NEW])?.ok()?;
    c.until("vm", NEW, ".status.printableStatus", "Stopped")?;
    // With a VM on it the node keeps its shim, beyond the time after which the agent would remove it.
    c.until_events(&node, &["stop the VMIs default/old first"])?;
    std::thread::sleep(REMOVAL);
    ensure!(!versions(c)?.is_empty(), "removed under a VM");
    c.virtctl(&["stop", OLD])?.ok()?;
    c.until("vm", OLD, ".status.printableStatus", "Stopped")?;
    c.until_true("the shim is not removed", || {
        // The removal restarts containerd, which `kubectl exec` needs.
        let left = c.on_node("ls -d /opt/husk 2>/dev/null || true");
        Ok(match left.as_deref() {
            Ok("") => Ok(()),
            other => Err(format!("{other:?}")),
        })
    })?;
    c.until_events(&node, &["Husk's shim is removed from the node"])?;
    let left = c.on_node("grep -n /opt/husk /etc/containerd/config.toml || true")?;
    ensure!(left.is_empty(), "left on the node: {left}");
    Ok(())
}

fn come_back(c: &KubeVirt<'_>, before: &str) -> Result<()> {
    let node = c.node()?;
    c.kubectl(&["label", "--overwrite", "node", &node, "husk.io/node=true"])?
        .ok()?;
    let log = replace_agent(c)?;
    ensure!(log.contains("created"), "{log}");
    c.until(
        "node",
        &node,
        ".metadata.labels.kubevirt\\.io/schedulable",
        "true",
    )?;
    let now = c.on_node("cat /etc/containerd/config.toml")?;
    let settings = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.contains("/opt/husk/"));
        lines.map(str::to_owned).collect()
    };
    ensure!(settings(&now) == settings(before), "{now}\nand before\n{before}");
    c.virtctl(&["start", OLD])?.ok()?;
    c.until(VMI, OLD, ".status.phase", "Running")
}
