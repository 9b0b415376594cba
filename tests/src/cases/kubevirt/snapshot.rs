//! KubeVirt's VirtualMachineSnapshot of a running VM: virt-controller freezes the guest, and thaws it when the storage
//! driver has its copy. The case does the driver's part.

use crate::harness::context::{TestContext, expect_contains};
use crate::harness::kubevirt::objects::{local_volume, virtual_machine};
use crate::harness::kubevirt::{KubeVirt, VMI};
use crate::harness::{Case, met};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kubevirt-snapshot",
    about: "VirtualMachineSnapshot of a VM that writes: frozen, copied, thawed; a driver that does not answer; a paused VM",
    limit: Duration::from_secs(1200),
    run,
};

const VM: &str = "snapped";
const CLAIM: &str = "snapped-data";
const CLASS: &str = "snapped";
/// Storage driver of the class, whose part the case does.
const DRIVER: &str = "snapshot.husk.io";
/// Folder of the claim's data on the node.
const DATA: &str = "/var/tmp/husk-snapshot";
const FROZEN: &str = ".status.fsFreezeStatus";
const PHASE: &str = ".status.phase";
const CRDS: [(&str, &str, &str); 3] = [
    ("volumesnapshots", "VolumeSnapshot", "Namespaced"),
    ("volumesnapshotclasses", "VolumeSnapshotClass", "Cluster"),
    ("volumesnapshotcontents", "VolumeSnapshotContent", "Cluster"),
];
/// Numbers that the guest has stored, as long as it can.
const WRITER: &str = "(i=0; while i=$((i+1)); do echo $i > /mnt/count; sync; echo $i > /tmp/stored; done) &";

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    c.on_node(&format!(
        "mkdir -p {DATA} && truncate -s 64M {DATA}/disk.img && mkfs.ext4 -q {DATA}/disk.img && chown -R 107:107 {DATA}"
    ))?;
    c.apply(&CRDS.map(crd))?;
    for (plural, ..) in CRDS {
        let name = format!("{plural}.snapshot.storage.k8s.io");
        c.until_condition("crd", &name, "Established", "True")?;
    }
    c.apply(&classes())?;
    let [mut volume, mut claim] = local_volume(CLAIM, "Filesystem", (DATA, "80Mi"), &c.node()?);
    for object in [&mut volume, &mut claim] {
        object["spec"]["storageClassName"] = json!(CLASS);
    }
    c.apply(&[volume, claim, vm()])?;
    c.until("vm", VM, ".status.printableStatus", "Running")?;
    c.until_condition(VMI, VM, "AgentConnected", "True")?;
    c.in_guest(VM, |shell| {
        shell.ok("mkdir -p /mnt /tmp && mount -t ext4 /dev/vda /mnt")?;
        shell.send(WRITER)
    })?;
    ctx.part("a copy while frozen", || copied(c));
    ctx.part("a driver that does not answer", || unanswered(c));
    ctx.part("a paused VM", || paused(c));
    c.delete("vm", VM)?;
    c.until_none(VMI)?;
    c.delete_all(&[
        ("pvc", CLAIM),
        ("pv", CLAIM),
        ("storageclass", CLASS),
        ("volumesnapshotclass", CLASS),
    ])?;
    for (plural, ..) in CRDS {
        c.delete("crd", &format!("{plural}.snapshot.storage.k8s.io"))?;
    }
    c.on_node(&format!("rm -r {DATA}"))?;
    c.delete("pod", "node-shell")?;
    c.until_none("pods")
}

/// A resource of the snapshot API, of which virt-controller uses the names and the fields that the case writes.
fn crd((plural, kind, scope): (&str, &str, &str)) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": format!("{plural}.snapshot.storage.k8s.io"),
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": "snapshot.storage.k8s.io",
            "scope": scope,
            "names": {"plural": plural, "kind": kind, "singular": kind.to_lowercase()},
            "versions": [{
                "name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
            }],
        },
    })
}

fn classes() -> [Value; 2] {
    let storage = json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": CLASS},
        "provisioner": DRIVER,
    });
    let snapshots = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshotClass",
        "metadata": {"name": CLASS},
        "driver": DRIVER,
        "deletionPolicy": "Delete",
    });
    [storage, snapshots]
}

fn vm() -> Value {
    let mut vm = virtual_machine(VM, "script,disks,agent,shell");
    let spec = &mut vm["spec"]["template"]["spec"];
    spec["domain"]["memory"]["guest"] = json!("192Mi");
    spec["domain"]["devices"]["disks"] = json!([{"name": "data", "disk": {"bus": "virtio"}}]);
    spec["volumes"] = json!([{"name": "data", "persistentVolumeClaim": {"claimName": CLAIM}}]);
    vm
}

fn snapshot(name: &str, deadline: &str) -> Value {
    json!({
        "apiVersion": "snapshot.kubevirt.io/v1beta1",
        "kind": "VirtualMachineSnapshot",
        "metadata": {"name": name},
        "spec": {
            "source": {"apiGroup": "kubevirt.io", "kind": "VirtualMachine", "name": VM},
            "failureDeadline": deadline,
        },
    })
}

/// Waits until virt-controller has asked the driver for a copy. Returns the VolumeSnapshot's name.
fn asked(c: &KubeVirt<'_>) -> Result<String> {
    c.until_true("no VolumeSnapshot", || {
        let names = volume_snapshots(c)?;
        met(!names.is_empty(), || names)
    })?;
    volume_snapshots(c)
}

fn volume_snapshots(c: &KubeVirt<'_>) -> Result<String> {
    let names = "jsonpath={.items[*].metadata.name}";
    c.kubectl(&["get", "volumesnapshots", "-o", names])?.ok()
}

/// The driver's word that it has the copy.
fn answer(c: &KubeVirt<'_>, name: &str) -> Result<()> {
    let now = c.on_node("date -u +%Y-%m-%dT%H:%M:%SZ")?;
    let status = json!({"status": {"creationTime": now.trim(), "readyToUse": true}});
    let options = ["--subresource=status", "--type=merge"];
    c.patch("volumesnapshot", name, &options, &status)
}

/// The last number that the guest has stored.
fn stored(c: &KubeVirt<'_>) -> Result<u64> {
    let said = c.in_guest(VM, |shell| shell.ok("cat /tmp/stored"))?;
    let number = said.trim().lines().last().unwrap_or_default();
    number
        .trim()
        .parse()
        .with_context(|| format!("a number: {said:?}"))
}

/// The guest goes on writing.
fn writes(c: &KubeVirt<'_>) -> Result<()> {
    let before = stored(c)?;
    c.until_true("the guest does not write", || {
        let now = stored(c)?;
        met(now > before, || now.to_string())
    })
}

fn copied(c: &KubeVirt<'_>) -> Result<()> {
    writes(c)?;
    c.apply(&[snapshot("first", "5m0s")])?;
    let name = asked(c)?;
    c.until(VMI, VM, FROZEN, "frozen")?;
    let acknowledged = stored(c)?;
    let clean = c.on_node(&format!(
        "cp {DATA}/disk.img {DATA}/copy.img && e2fsck -fn {DATA}/copy.img >&2 && \
         dumpe2fs -h {DATA}/copy.img 2>&1 && debugfs -R 'cat /count' {DATA}/copy.img 2>/dev/null | sed 's/^/count=/'"
    ))?;
    ensure!(
        !clean.contains("needs_recovery"),
        "the journal is not empty: {clean}"
    );
    let count = clean.lines().find_map(|line| line.strip_prefix("count="));
    let count: u64 = count
        .unwrap_or_default()
        .trim()
        .parse()
        .context("count of the copy")?;
    ensure!(
        count >= acknowledged,
        "{count} in the copy, the guest has stored {acknowledged}"
    );
    answer(c, &name)?;
    c.until("vmsnapshot", "first", PHASE, "Succeeded")?;
    c.until("vmsnapshot", "first", ".status.readyToUse", "true")?;
    c.until(VMI, VM, FROZEN, "")?;
    let indications = c.field("vmsnapshot", "first", ".status.indications")?;
    expect_contains(&indications, &["Online", "GuestAgent"])?;
    writes(c)?;
    c.delete("vmsnapshot", "first")?;
    c.until_none("volumesnapshots")
}

/// At the snapshot's deadline the guest is thawed.
fn unanswered(c: &KubeVirt<'_>) -> Result<()> {
    c.apply(&[snapshot("late", "20s")])?;
    asked(c)?;
    c.until(VMI, VM, FROZEN, "frozen")?;
    c.until("vmsnapshot", "late", PHASE, "Failed")?;
    c.until(VMI, VM, FROZEN, "")?;
    writes(c)?;
    c.delete("vmsnapshot", "late")?;
    c.until_none("volumesnapshots")
}

/// A paused guest cannot be frozen: KubeVirt takes the copy as it is, and says so.
fn paused(c: &KubeVirt<'_>) -> Result<()> {
    c.virtctl(&["pause", "vm", VM])?.ok()?;
    c.until_condition(VMI, VM, "Paused", "True")?;
    c.apply(&[snapshot("paused", "5m0s")])?;
    let name = asked(c)?;
    ensure!(c.field(VMI, VM, FROZEN)?.is_empty(), "a paused guest is frozen");
    answer(c, &name)?;
    c.until("vmsnapshot", "paused", PHASE, "Succeeded")?;
    expect_contains(
        &c.field("vmsnapshot", "paused", ".status.indications")?,
        &["Paused"],
    )?;
    c.virtctl(&["unpause", "vm", VM])?.ok()?;
    c.until_condition(VMI, VM, "Paused", "")?;
    writes(c)?;
    c.delete("vmsnapshot", "paused")?;
    c.until_none("volumesnapshots")
}
