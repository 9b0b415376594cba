//! The ends of VMs: power-off, panic, forced stop and restart, node drain.

use crate::harness::context::TestContext;
use crate::harness::kubevirt::objects::{instance, virtual_machine};
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met};
use anyhow::{Result, ensure};
use serde_json::json;
use std::time::{Duration, Instant};

pub const CASE: Case = Case {
    name: "kubevirt-end",
    about: "final phases of a power-off and a panic; restart and stop by force; eviction for ephemeral storage; drain of the node",
    limit: Duration::from_secs(1200),
    run,
};

const DEAF: &str = "deaf";
const DRAINED: &str = "drained";
/// Time in which a VM without a grace period ends.
const FORCED: Duration = Duration::from_secs(45);

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    ctx.part("phases", || phases(c));
    ctx.part("force", || force(c));
    ctx.part("ephemeral-storage", || ephemeral_storage(c));
    ctx.part("drain", || drain(c));
    // Also if the drain failed.
    c.kubectl(&["uncordon", &c.node()?])?.ok()?;
    for kind in ["vm", VMI] {
        c.kubectl(&["delete", kind, "--all", "--wait=false"])?.ok()?;
    }
    c.until_no_guests()
}

/// VMIs without a VirtualMachine keep their final phase.
fn phases(c: &KubeVirt<'_>) -> Result<()> {
    c.apply(&[instance("succeeds", "poweroff"), instance("panics", "panic")])?;
    for (name, phase, event) in [
        (
            "succeeds",
            "Succeeded",
            "The VirtualMachineInstance was shut down.",
        ),
        ("panics", "Failed", "The VirtualMachineInstance crashed."),
    ] {
        c.until(VMI, name, ".status.phase", phase)?;
        c.until_events(name, &[event])?;
        c.delete(VMI, name)?;
    }
    c.until_no_guests()
}

/// A guest that does not hear its power button, and has a long grace period.
fn force(c: &KubeVirt<'_>) -> Result<()> {
    let mut vm = virtual_machine(DEAF, "shell");
    vm["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = json!(600);
    c.apply(&[vm])?;
    c.until("vm", DEAF, ".status.printableStatus", "Running")?;
    let before = c.field(VMI, DEAF, ".metadata.uid")?;
    let started = Instant::now();
    c.virtctl(&["restart", DEAF, "--force", "--grace-period=0"])?
        .ok()?;
    c.until_replaced(DEAF, &before)?;
    let started_stop = Instant::now();
    c.virtctl(&["stop", DEAF, "--force", "--grace-period=0"])?.ok()?;
    c.until("vm", DEAF, ".status.printableStatus", "Stopped")?;
    ensure!(
        started.elapsed() < 3 * FORCED && started_stop.elapsed() < FORCED,
        "restart {:?}, stop {:?}",
        started_stop - started,
        started_stop.elapsed()
    );
    c.delete("vm", DEAF)
}

/// The kubelet evicts the pod of a guest that writes more to an emptyDisk than its pod may.
fn ephemeral_storage(c: &KubeVirt<'_>) -> Result<()> {
    let mut vmi = instance("fills", "disks,shell");
    let spec = &mut vmi["spec"];
    spec["domain"]["devices"]["disks"] = json!([{"name": "empty", "disk": {"bus": "virtio"}}]);
    spec["domain"]["resources"] = json!({"limits": {"ephemeral-storage": "64Mi"}});
    spec["volumes"] = json!([{"name": "empty", "emptyDisk": {"capacity": "512Mi"}}]);
    c.apply(&[vmi])?;
    c.until_condition(VMI, "fills", "Ready", "True")?;
    c.in_guest("fills", |shell| {
        // virt-controller adds 50 MB to the limit.
        shell
            .ok("dd if=/dev/zero of=/dev/vda bs=1M count=300 conv=fsync")
            .map(drop)
    })?;
    let pod = c.field("pods", "-lapp=fills", ".items[0].metadata.name")?;
    c.until("pod", &pod, ".status.reason", "Evicted")?;
    c.until(VMI, "fills", ".status.phase", "Failed")?;
    c.delete(VMI, "fills")?;
    c.until_no_guests()
}

/// The eviction of a launcher pod without an eviction strategy ends the VM; another starts where it may.
fn drain(c: &KubeVirt<'_>) -> Result<()> {
    let mut migrates = virtual_machine("migrates", "button,shell");
    migrates["spec"]["template"]["spec"]["evictionStrategy"] = json!("LiveMigrate");
    c.apply(&[virtual_machine(DRAINED, "button,shell"), migrates])?;
    for name in [DRAINED, "migrates"] {
        c.until_condition(VMI, name, "Ready", "True")?;
    }
    let before = c.field(VMI, DRAINED, ".metadata.uid")?;
    let node = c.node()?;
    let words = [
        "drain",
        &node,
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--force",
        "--timeout=50s",
        "--pod-selector=app",
    ];
    // KubeVirt's own webhook protects the VM that asks for a migration, which Husk does not have.
    c.kubectl(&words)?.fails_with(
        1,
        &["is configured with an eviction strategy but is not live-migratable"],
    )?;
    c.until_true("the VM is not evicted", || {
        let uid = c.field(VMI, DRAINED, ".metadata.uid")?;
        met(uid != before, || uid)
    })?;
    c.until("vm", DRAINED, ".status.printableStatus", "ErrorUnschedulable")?;
    let phase = c.field(VMI, "migrates", ".status.phase")?;
    ensure!(phase == "Running", "the other VMI is {phase}");
    c.kubectl(&["uncordon", &node])?.ok()?;
    c.until(VMI, DRAINED, ".status.phase", "Running")
}
