//! Objects of which virt-controller makes VMIs: replica sets, pools, instance types, run strategies.

use crate::harness::context::TestContext;
use crate::harness::kubevirt::objects::{template, virtual_machine};
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met};
use anyhow::{Result, ensure};
use serde_json::{Value, json};
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kubevirt-sets",
    about: "VirtualMachineInstanceReplicaSet 0, 5, 2; VirtualMachinePool; an instance type and a preference; every runStrategy",
    limit: Duration::from_secs(1200),
    run,
};

const SET: &str = "set";
const POOL: &str = "pool";

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    ctx.part("replica set", || replica_set(c));
    ctx.part("pool", || pool(c));
    ctx.part("instance type", || instance_type(c));
    ctx.part("run strategies", || run_strategies(c));
    for kind in ["vmirs", "vmpool", "vm", VMI] {
        c.kubectl(&["delete", kind, "--all", "--wait=false"])?.ok()?;
    }
    c.until_no_guests()
}

fn replica_set(c: &KubeVirt<'_>) -> Result<()> {
    c.apply(&[json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstanceReplicaSet",
        "metadata": {"name": SET},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": SET}},
            "template": template(SET, "button,shell"),
        },
    })])?;
    for count in ["5", "2"] {
        c.kubectl(&["scale", "vmirs", SET, &format!("--replicas={count}")])?
            .ok()?;
        c.until("vmirs", SET, ".status.readyReplicas", count)?;
        c.until_true("the set has other VMIs", || {
            let phases = c.field(VMI, "-lapp=set", ".items[*].status.phase")?;
            let running = phases.split(' ').all(|phase| phase == "Running");
            let all = phases.split(' ').count().to_string() == count;
            met(running && all, || phases)
        })?;
    }
    c.delete("vmirs", SET)?;
    c.until_none(VMI)
}

fn pool(c: &KubeVirt<'_>) -> Result<()> {
    c.apply(&[json!({
        "apiVersion": "pool.kubevirt.io/v1beta1",
        "kind": "VirtualMachinePool",
        "metadata": {"name": POOL},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": POOL}},
            "virtualMachineTemplate": {
                "metadata": {"labels": {"app": POOL}},
                "spec": {"runStrategy": "Always", "template": template(POOL, "button,shell")},
            },
        },
    })])?;
    c.until("vmpool", POOL, ".status.readyReplicas", "2")?;
    c.delete("vmpool", POOL)?;
    c.until_none("vm")?;
    c.until_none(VMI)
}

/// A VM without memory and buses of its own.
fn instance_type(c: &KubeVirt<'_>) -> Result<()> {
    let api = "instancetype.kubevirt.io/v1beta1";
    let mut vm = virtual_machine("typed", "scsi,button,shell");
    let domain = &mut vm["spec"]["template"]["spec"]["domain"];
    domain["memory"] = Value::Null;
    domain["devices"]["disks"] = json!([{"name": "empty", "disk": {}}]);
    vm["spec"]["template"]["spec"]["volumes"] = json!([{"name": "empty", "emptyDisk": {"capacity": "8Mi"}}]);
    vm["spec"]["instancetype"] = json!({"kind": "VirtualMachineInstancetype", "name": "small"});
    vm["spec"]["preference"] = json!({"kind": "VirtualMachinePreference", "name": "scsi"});
    c.apply(&[
        json!({
            "apiVersion": api,
            "kind": "VirtualMachineInstancetype",
            "metadata": {"name": "small"},
            "spec": {"cpu": {"guest": 2}, "memory": {"guest": "160Mi"}},
        }),
        json!({
            "apiVersion": api,
            "kind": "VirtualMachinePreference",
            "metadata": {"name": "scsi"},
            "spec": {"devices": {"preferredDiskBus": "scsi"}},
        }),
        vm,
    ])?;
    c.until("vm", "typed", ".status.printableStatus", "Running")?;
    c.in_guest("typed", |shell| {
        shell.expect_contains("nproc; ls /sys/block", &["2", "sda"])?;
        let memory: u32 = shell
            .ok("sed -n 's/^MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo")?
            .parse()?;
        ensure!((110_000..160 << 10).contains(&memory), "{memory} KiB of memory");
        Ok(())
    })?;
    c.delete_all(&[
        ("vm", "typed"),
        ("virtualmachineinstancetype", "small"),
        ("virtualmachinepreference", "scsi"),
    ])?;
    c.until_none(VMI)
}

fn with_strategy(name: &str, strategy: &str, words: &str) -> Value {
    let mut vm = virtual_machine(name, words);
    vm["spec"]["runStrategy"] = json!(strategy);
    vm
}

/// `Always` is in `kubevirt-life`.
fn run_strategies(c: &KubeVirt<'_>) -> Result<()> {
    let words = "button,shell";
    c.apply(&[
        with_strategy("manual", "Manual", words),
        with_strategy("halted", "Halted", words),
        with_strategy("once", "Once", words),
        with_strategy("rerun", "RerunOnFailure", words),
        with_strategy("rerun-panic", "RerunOnFailure", "panic"),
    ])?;
    let status = |name: &str, value: &str| c.until("vm", name, ".status.printableStatus", value);
    status("manual", "Stopped")?;
    status("halted", "Stopped")?;
    c.virtctl(&["start", "manual"])?.ok()?;
    c.virtctl(&["start", "halted"])?.ok()?;
    let strategy = c.field("vm", "halted", ".spec.runStrategy")?;
    ensure!(strategy == "Always", "virtctl start: {strategy}");
    for name in ["manual", "halted", "once", "rerun"] {
        status(name, "Running")?;
    }
    // A guest that panics is Failed, and RerunOnFailure starts another.
    c.until_events("rerun-panic", &["The VirtualMachineInstance crashed."])?;
    c.delete("vm", "rerun-panic")?;
    for name in ["manual", "once", "rerun"] {
        c.power_off(name)?;
        status(name, "Stopped")?;
    }
    Ok(())
}
