//! Volumes that are plugged into a running VM by `virtctl`.

use crate::harness::Case;
use crate::harness::context::TestContext;
use crate::harness::kubevirt::objects::{local_volume, virtual_machine};
use crate::harness::kubevirt::{KubeVirt, VMI};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

pub const CASE: Case = Case {
    name: "kubevirt-hotplug",
    about: "virtctl addvolume and removevolume with block and filesystem claims; a start with plugged volumes",
    limit: Duration::from_secs(1200),
    run,
};

const VM: &str = "plugs";
/// Folder of the volumes' data on the node.
const DATA: &str = "/var/tmp/husk-hotplug";

fn run(ctx: &TestContext) -> Result<()> {
    let c = &KubeVirt::find(ctx)?;
    let device = c.on_node(&format!(
        "mkdir -p {DATA}/files && truncate -s 64M {DATA}/block.img {DATA}/files/disk.img && \
         chown -R 107:107 {DATA} && losetup -f --show {DATA}/block.img"
    ))?;
    let device = device.trim();
    let node = c.node()?;
    let files = format!("{DATA}/files");
    for (name, mode, path) in [
        ("block", "Block", device),
        ("files", "Filesystem", files.as_str()),
    ] {
        c.apply(&local_volume(name, mode, (path, "64Mi"), &node))?;
        c.until("pvc", name, ".status.phase", "Bound")?;
    }
    c.apply(&[virtual_machine(VM, "scsi,button,shell")])?;
    c.until("vm", VM, ".status.printableStatus", "Running")?;
    ctx.part("block", || plug(c, "block", "BLOCK1"));
    ctx.part("filesystem", || plug(c, "files", "FILES1"));
    ctx.part("data", || data(c, device));
    ctx.part("unplug", || unplug(c, "block"));
    ctx.part("restart", || restart(c));
    ctx.part("unplug filesystem", || unplug(c, "files"));
    c.delete("vm", VM)?;
    c.until_none("vm")?;
    c.until_none(VMI)?;
    // The node's loop device is free again: nothing holds the volume.
    c.on_node(&format!("losetup -d {device} && rm -r {DATA}"))?;
    let busy = c.on_node("losetup -a")?;
    ensure!(!busy.contains(DATA), "{busy}");
    for name in ["block", "files"] {
        c.delete("pvc", name)?;
        c.delete("pv", name)?;
    }
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
    // The guest scans its controller after the VM has the disk.
    let serials = "/sys/block/sd*/device/vpd_pg80";
    let find = format!("until grep -q {serial} {serials}; do sleep 0.2; done");
    c.in_guest(VM, |shell| shell.ok(&find).map(drop))
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
