//! Volumes that are plugged into a running VM by `virtctl`.

use crate::harness::Case;
use crate::harness::context::TestContext;
use crate::harness::kubevirt::objects::{instance, local_volume, virtual_machine};
use crate::harness::kubevirt::{KubeVirt, VMI};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kubevirt-hotplug",
    about: "volumes plugged by virtctl and by the VM's template, block, filesystem and hostPath; claims that grow; a start with plugged volumes; memory dumps fail",
    limit: Duration::from_secs(1200),
    run,
};

const VM: &str = "plugs";
/// Folder of the volumes' data on the node.
const DATA: &str = "/var/tmp/husk-hotplug";

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    let device = c.on_node(&format!(
        "mkdir -p {DATA}/files {DATA}/blank && truncate -s 64M {DATA}/block.img {DATA}/files/disk.img && \
         chown -R 107:107 {DATA} && losetup -f --show {DATA}/block.img"
    ))?;
    let device = device.trim();
    let node = c.node()?;
    let (files, blank) = (format!("{DATA}/files"), format!("{DATA}/blank"));
    c.apply(&[json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": "local"},
        "provisioner": "kubernetes.io/no-provisioner",
        "allowVolumeExpansion": true,
    })])?;
    for (name, mode, path, size) in [
        ("block", "Block", device, "64Mi"),
        ("files", "Filesystem", files.as_str(), "64Mi"),
        ("blank", "Filesystem", blank.as_str(), "48Mi"),
        ("dump", "Filesystem", DATA, "1Gi"),
    ] {
        c.apply(&local_volume(name, mode, (path, size), &node))?;
        c.until("pvc", name, ".status.phase", "Bound")?;
    }
    host_path_volume(c, &node)?;
    c.apply(&[virtual_machine(VM, "scsi,button,shell")])?;
    c.until("vm", VM, ".status.printableStatus", "Running")?;
    ctx.part("block", || plug(c, "block", "BLOCK1"));
    ctx.part("filesystem", || plug(c, "files", "FILES1"));
    ctx.part("data", || data(c, device));
    ctx.part("growth", || growth(c, device));
    ctx.part("unplug", || unplug(c, "block"));
    ctx.part("restart", || restart(c));
    ctx.part("memory dump", || memory_dump(c));
    ctx.part("template", || template(c));
    ctx.part("unplug filesystem", || unplug(c, "files"));
    ctx.part("hostPath", || host_path(c));
    ctx.part("without --persist", || without_persist(c));
    c.delete("vm", VM)?;
    ctx.part("VMI without a VM", || without_vm(c));
    ctx.part("blank claim", || blank_claim(c));
    c.until_none("vm")?;
    c.until_none(VMI)?;
    // The node's loop device is free again: nothing holds the volume.
    c.on_node(&format!("losetup -d {device} && rm -r {DATA}"))?;
    let busy = c.on_node("losetup -a")?;
    ensure!(!busy.contains(DATA), "{busy}");
    for name in ["block", "files", "blank", "dump", "host"] {
        c.delete("pvc", name)?;
        c.delete("pv", name)?;
    }
    c.delete("storageclass", "local")?;
    c.delete("pod", "node-shell")?;
    c.until_none("pods")
}

/// JSONPath of a field of a volume's status.
fn status(volume: &str, field: &str) -> String {
    format!(".status.volumeStatus[?(@.name==\"{volume}\")].{field}")
}

fn plug(c: &KubeVirt<'_>, name: &str, serial: &str) -> Result<()> {
    let (volume, serial_option) = (format!("--volume-name={name}"), format!("--serial={serial}"));
    c.virtctl(&["addvolume", VM, &volume, &serial_option, "--persist"])?
        .ok()?;
    c.until(VMI, VM, &status(name, "phase"), "Ready")?;
    let target = c.field(VMI, VM, &status(name, "target"))?;
    ensure!(target.starts_with("sd"), "target {target:?}");
    c.until_events(
        VM,
        &[&format!("Successfully attach hotplugged volume {name} to VM")],
    )?;
    finds(c, VM, serial)
}

/// Waits until a guest has a disk with this serial number: it scans its controller after the VM has the disk.
fn finds(c: &KubeVirt<'_>, vm: &str, serial: &str) -> Result<()> {
    c.guest_does(
        vm,
        &format!("until grep -q {serial} /sys/block/sd*/device/vpd_pg80; do sleep 0.2; done"),
    )
}

/// Makes the claim `host` of a hostPath volume, which the kubelet does not mount in the pod's directory.
fn host_path_volume(c: &KubeVirt<'_>, node: &str) -> Result<()> {
    let folder = format!("{DATA}/host");
    c.on_node(&format!(
        "mkdir {folder} && truncate -s 64M {folder}/disk.img && chown -R 107:107 {folder}"
    ))?;
    let mut objects = local_volume("host", "Filesystem", (&folder, "64Mi"), node);
    let spec = objects[0]["spec"].as_object_mut().context("no spec")?;
    let local = spec.remove("local").context("no local volume")?;
    spec.insert("hostPath".to_owned(), local);
    c.apply(&objects)?;
    c.until("pvc", "host", ".status.phase", "Bound")
}

/// The image of a hostPath volume is plugged, written and unplugged.
fn host_path(c: &KubeVirt<'_>) -> Result<()> {
    plug(c, "host", "HOST1")?;
    let disk = "disk=$(basename $(dirname $(dirname $(grep -l HOST1 /sys/block/sd*/device/vpd_pg80))))";
    c.guest_does(
        VM,
        &format!("{disk}; echo of-host | dd of=/dev/$disk bs=512 conv=sync,fsync 2>/dev/null"),
    )?;
    let written = c.on_node(&format!("head -c 7 {DATA}/host/disk.img"))?;
    ensure!(written == "of-host", "on the node: {written:?}");
    unplug(c, "host")
}

/// The guest's writes reach the node's device and file.
fn data(c: &KubeVirt<'_>, device: &str) -> Result<()> {
    c.in_guest(VM, |shell| {
        for disk in ["sda", "sdb"] {
            shell.ok(&format!(
                "echo of-{disk} | dd of=/dev/{disk} bs=512 conv=sync,fsync 2>/dev/null"
            ))?;
        }
        Ok(())
    })?;
    let written = c.on_node(&format!("head -c 6 {device}; head -c 6 {DATA}/files/disk.img"))?;
    ensure!(written == "of-sdaof-sdb", "on the node: {written:?}");
    Ok(())
}

/// The guest sees that the device behind the block claim has grown, and that the other claim has. Claims of local
/// volumes do not grow by themselves, so the case writes what a driver would.
fn growth(c: &KubeVirt<'_>, device: &str) -> Result<()> {
    c.on_node(&format!(
        "truncate -s 96M {DATA}/block.img && losetup -c {device}"
    ))?;
    let storage = json!({"storage": "128Mi"});
    let requests = json!({"spec": {"resources": {"requests": storage}}});
    let capacity = json!({"status": {"capacity": storage}});
    c.patch("pvc", "files", &[], &requests)?;
    c.patch("pvc", "files", &["--subresource=status"], &capacity)?;
    c.in_guest(VM, |shell| {
        // KubeVirt leaves some percent of the claim to its filesystem.
        let grown = "b=$(cat /sys/block/sda/size) f=$(cat /sys/block/sdb/size); \
                     [ $b = 196608 ] && [ $f -gt 229376 ] && [ $f -lt 262144 ]";
        let wait = format!("until {grown}; do sleep 0.5; done");
        shell.ok(&wait)?;
        shell.expect_contains("head -c 6 /dev/sda; head -c 6 /dev/sdb", &["of-sdaof-sdb"])
    })
}

/// A memory dump fails, and its claim is free again. virt-api asks for CDI's configuration first, which CDI lets
/// everyone read.
fn memory_dump(c: &KubeVirt<'_>) -> Result<()> {
    let group = "rbac.authorization.k8s.io";
    let api = format!("{group}/v1");
    let metadata = json!({"name": "cdi-config-reader"});
    let rule = json!({"apiGroups": ["cdi.kubevirt.io"], "resources": ["cdiconfigs"], "verbs": ["get"]});
    let everyone = json!({"apiGroup": group, "kind": "Group", "name": "system:authenticated"});
    let role = json!({"apiGroup": group, "kind": "ClusterRole", "name": "cdi-config-reader"});
    c.apply(&[
        json!({"apiVersion": api, "kind": "ClusterRole", "metadata": metadata, "rules": [rule]}),
        json!({
            "apiVersion": api, "kind": "ClusterRoleBinding", "metadata": metadata,
            "roleRef": role, "subjects": [everyone],
        }),
    ])?;
    c.virtctl(&["memory-dump", "get", VM, "--claim-name=dump"])?
        .ok()?;
    c.until("vm", VM, ".status.memoryDumpRequest.phase", "Failed")?;
    let message = c.field("vm", VM, ".status.memoryDumpRequest.message")?;
    ensure!(message.contains("Husk does not dump memory"), "{message:?}");
    c.until(VMI, VM, &status("dump", "name"), "")?;
    c.virtctl(&["memory-dump", "remove", VM])?.ok()?;
    c.until("vm", VM, ".status.memoryDumpRequest", "")?;
    for kind in ["clusterrole", "clusterrolebinding"] {
        c.delete(kind, "cdi-config-reader")?;
    }
    Ok(())
}

/// A volume that the owner writes into the VM's template is plugged, and is unplugged when it is gone from there.
fn template(c: &KubeVirt<'_>) -> Result<()> {
    let patch = |operations: Value| c.patch("vm", VM, &["--type=json"], &operations);
    let (volumes, disks) = (
        "/spec/template/spec/volumes",
        "/spec/template/spec/domain/devices/disks",
    );
    let claim = json!({"claimName": "block", "hotpluggable": true});
    patch(json!([
        {"op": "add", "path": format!("{volumes}/-"), "value": {"name": "block", "persistentVolumeClaim": claim}},
        {"op": "add", "path": format!("{disks}/-"),
         "value": {"name": "block", "disk": {"bus": "scsi"}, "serial": "TEMPLATE1"}},
    ]))?;
    c.until(VMI, VM, &status("block", "phase"), "Ready")?;
    finds(c, VM, "TEMPLATE1")?;
    patch(json!([
        {"op": "remove", "path": format!("{volumes}/1")},
        {"op": "remove", "path": format!("{disks}/1")},
    ]))?;
    c.until(VMI, VM, &status("block", "name"), "")
}

/// Without `--persist`, which has no effect since KubeVirt 1.9, virtctl also writes the volume into the VM's template.
fn without_persist(c: &KubeVirt<'_>) -> Result<()> {
    c.virtctl(&["addvolume", VM, "--volume-name=block", "--serial=PLAIN1"])?
        .ok()?;
    c.until(VMI, VM, &status("block", "phase"), "Ready")?;
    let volumes = c.field("vm", VM, ".spec.template.spec.volumes[*].name")?;
    ensure!(volumes.contains("block"), "volumes of the template: {volumes}");
    c.virtctl(&["removevolume", VM, "--volume-name=block"])?.ok()?;
    c.until(VMI, VM, &status("block", "name"), "")
}

/// A VMI that no VM owns takes volumes until it ends.
fn without_vm(c: &KubeVirt<'_>) -> Result<()> {
    let name = "bare";
    c.apply(&[instance(name, "scsi,button,shell")])?;
    c.until(VMI, name, ".status.phase", "Running")?;
    c.virtctl(&["addvolume", name, "--volume-name=block", "--serial=BARE1"])?
        .ok()?;
    c.until(VMI, name, &status("block", "phase"), "Ready")?;
    finds(c, name, "BARE1")?;
    c.virtctl(&["removevolume", name, "--volume-name=block"])?.ok()?;
    c.until(VMI, name, &status("block", "name"), "")?;
    c.delete(VMI, name)
}

/// A claim without an image gets one when its VM starts, which the next VM uses.
fn blank_claim(c: &KubeVirt<'_>) -> Result<()> {
    let name = "blank";
    let mut vmi = instance(name, "scsi,button,shell");
    vmi["spec"]["volumes"] = json!([{"name": name, "persistentVolumeClaim": {"claimName": name}}]);
    vmi["spec"]["domain"]["devices"]["disks"] = json!([{"name": name, "disk": {"bus": "scsi"}}]);
    for wanted in ["0", "KEPT"] {
        c.apply(&[vmi.clone()])?;
        c.until(VMI, name, ".status.phase", "Running")?;
        c.in_guest(name, |shell| {
            shell.expect_contains("cat /sys/block/sda/size", &["98304"])?;
            shell.expect_contains("head -c 4 /dev/sda | tr '\\0' 0", &[wanted])?;
            shell
                .ok("printf KEPT | dd of=/dev/sda conv=notrunc,fsync status=none")
                .map(drop)
        })?;
        c.delete(VMI, name)?;
        c.until_none(VMI)?;
    }
    let owner = c.on_node(&format!("stat -c '%u %g %s' {DATA}/blank/disk.img"))?;
    ensure!(owner.trim() == "107 107 50331648", "{owner}");
    Ok(())
}

fn unplug(c: &KubeVirt<'_>, name: &str) -> Result<()> {
    let volume = format!("--volume-name={name}");
    c.virtctl(&["removevolume", VM, &volume, "--persist"])?.ok()?;
    c.until(VMI, VM, &status(name, "name"), "")?;
    let unmounted = format!("Volume {name} has been unmounted from virt-launcher pod");
    let unplugged = format!("Volume {name} has been unplugged");
    c.until_events(VM, &[&unmounted, &unplugged])
}

/// The volumes of the VM's template are there from the start of its next VMI.
fn restart(c: &KubeVirt<'_>) -> Result<()> {
    let before = c.field(VMI, VM, ".metadata.uid")?;
    c.virtctl(&["restart", VM])?.ok()?;
    c.until_replaced(VM, &before)?;
    c.until(VMI, VM, &status("files", "phase"), "Ready")?;
    c.in_guest(VM, |shell| {
        shell.expect_contains("head -c 6 /dev/sda", &["of-sdb"])
    })
    .context("the data of the filesystem's volume")
}
