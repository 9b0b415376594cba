//! KubeVirt's launcher pods, as virt-controller renders them. `tests/manifests/launcher-pod.json` is one that
//! virt-controller 1.9.0 wrote, for the VMI `default/testvmi`.

mod image_volumes;
mod recorded;

use self::image_volumes::image_volumes;
use self::recorded::{Launcher, vmi};
use super::ctr::LIMIT;
use super::pod::node;
use crate::harness::Case;
use crate::harness::containerd::image::Image;
use crate::harness::containerd::{BRIDGE, Containerd, Version};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::cri::{Cri, NAMESPACE};
use crate::harness::guest::Shell;
use crate::harness::program::Session;
use anyhow::{Context, Result, ensure};
use std::process::Command;
use std::time::Duration;

pub const CASE: Case = Case {
    name: "shim-launcher",
    about: "launcher pods of KubeVirt 1.9 get their VMI by SyncVmi: volumes as images and as containers, console log, probes",
    limit: LIMIT,
    run: |ctx| run(ctx, Version::V2_1),
};

pub const ON_NEWEST: Case = Case {
    name: "shim-launcher-newest",
    about: "the same with the newest containerd",
    limit: LIMIT,
    run: |ctx| run(ctx, Version::Newest),
};

/// The command of a volume container that only names its image.
const NO_OP: &[&str] = &["/container-disk-binary/usr/bin/container-disk", "--no-op"];

fn run(ctx: &TestContext, version: Version) -> Result<()> {
    let (containerd, cri) = node(ctx, version)?;
    // The recorded pod's containerDisk, and the image whose programs Husk does not run.
    Image::new(ctx, "debian")?
        .bytes("/disk/disk.img", &[7; 1 << 20])?
        .import(&containerd, NAMESPACE)?;
    Image::new(ctx, "husk-launcher")?
        .bytes("/empty", b"")?
        .import(&containerd, NAMESPACE)?;
    let (c, cri) = (&containerd, &cri);
    ctx.part("image volumes", || image_volumes(ctx, c, cri));
    ctx.part("volume containers", || volume_containers(ctx, c, cri));
    ctx.part("not started", || not_started(ctx, c, cri));
    ctx.part("recorded ends", || recorded_ends(ctx));
    Command::new("ip").args(["link", "delete", BRIDGE]).status()?;
    Ok(())
}

/// Each pod leaves a record of its VM's end, which the node's agent reads and removes.
fn recorded_ends(ctx: &TestContext) -> Result<()> {
    let folder = ctx.runtime_dir().join(".ended");
    let mut count = 0;
    for record in std::fs::read_dir(&folder)? {
        ensure!(record?.metadata()?.len() > 0, "an empty record");
        count += 1;
    }
    ensure!(count >= 3, "{count} records");
    Ok(std::fs::remove_dir_all(folder)?)
}

/// Without the gate: containers hold the images, and start after `compute`.
fn volume_containers(ctx: &TestContext, c: &Containerd<'_>, cri: &Cri) -> Result<()> {
    let mut pod = Launcher::new(ctx, cri, "containers")?;
    let mounts = pod.object["spec"]["containers"][0]["volumeMounts"].as_array_mut();
    let mounts = mounts.context("no mounts")?;
    mounts.retain(|mount| mount["name"] != "root");
    let copy = [
        "/usr/bin/cp",
        "--preserve=all",
        "/usr/bin/container-disk",
        "/init/usr/bin/container-disk",
    ];
    let binary = pod.other("container-disk-binary", "husk-launcher", &copy)?;
    pod.exits(&binary, 0)?;
    for (volume, image) in [
        ("volumeroot-init", "debian"),
        ("volumekernel-boot-volume-init", "kernel"),
    ] {
        let id = pod.other(volume, image, NO_OP)?;
        pod.exits(&id, 0)?;
    }
    let compute = pod.start("compute", &[], 0)?;
    pod.sync(&vmi("button")?)?
        .fails_with(2, &["no container of this pod provides volume \"root\" yet"])?;
    let mut volumes = Vec::new();
    for (volume, image) in [("volumeroot", "debian"), ("volumekernel-boot-volume", "kernel")] {
        let words = [
            "/usr/bin/container-disk",
            "--copy-path",
            "/var/run/kubevirt/container-disks/disk",
        ];
        volumes.push(pod.other(volume, image, &words)?);
    }
    // The pod has no container for the console's log then.
    let mut silent = vmi("button,shell")?;
    silent["spec"]["domain"]["devices"]["logSerialConsole"] = false.into();
    pod.sync(&silent)?.ok()?;
    let inspected = ctx.json(&["inspect", &pod.vm(), "-o", "json"])?;
    ensure!(inspected["phase"] == "Running", "{inspected}");
    let console = Session::on_terminal(
        ctx.husk(&["console", &pod.vm()]),
        &ctx.log("containers.console.log"),
    )?;
    Shell::small_on(&console)?.ok("echo marker-$((60 + 2))")?;
    drop(console);
    for log in std::fs::read_dir(cri.logs(pod.pod.name()))? {
        let log = log?.path();
        let text = std::fs::read_to_string(&log)?;
        ensure!(
            !text.contains("marker-62"),
            "{} has the console: {text}",
            log.display()
        );
    }
    // A killed VM ends its container.
    cri.stop(&compute, Duration::ZERO)?;
    pod.exits(&compute, 137)?;
    for id in volumes {
        pod.exits(&id, 0).context("a volume does not end with compute")?;
    }
    cri.remove_pod(&pod.pod)?;
    c.nothing_left()
}

/// Pods whose VM does not start.
fn not_started(ctx: &TestContext, c: &Containerd<'_>, cri: &Cri) -> Result<()> {
    let binds = Launcher::new(ctx, cri, "binds")?;
    let id = binds.other(
        "compute",
        "husk-launcher",
        &["/bin/bash", "-c", "echo", "bound PVCs"],
    )?;
    binds.exits(&id, 0)?;
    cri.remove_pod(&binds.pod)?;

    let mut late = Launcher::new(ctx, cri, "late")?;
    let command = &mut late.object["spec"]["containers"][0]["command"];
    let timeout = command
        .as_array()
        .and_then(|words| words.iter().position(|word| word == "324s"));
    command[timeout.context("no --qemu-timeout")?] = "3s".into();
    let id = late.start("compute", &[], 0)?;
    late.exits(&id, 2)?;
    expect_contains(
        &late.log("compute.log")?,
        &["did not start the VM default/testvmi in time"],
    )?;
    cri.remove_pod(&late.pod)?;

    // As the node's agent ends a VMI that was deleted before its start.
    let deleted = Launcher::new(ctx, cri, "deleted")?;
    let id = deleted.start("compute", &[], 0)?;
    let answer = ctx.run(&["stop", &deleted.vm()])?;
    expect_contains(&answer.text, &["the pod ended before SyncVmi started its VM"])?;
    deleted.exits(&id, 0)?;
    cri.remove_pod(&deleted.pod)?;

    // The sandbox alone, with a container that waits.
    let removed = Launcher::new(ctx, cri, "removed")?;
    removed.start("compute", &[], 0)?;
    cri.remove_pod(&removed.pod)?;

    let stopped = Launcher::new(ctx, cri, "stopped")?;
    let id = stopped.start("compute", &[], 0)?;
    cri.stop(&id, Duration::from_secs(10))?;
    stopped.exits(&id, 0)?;
    let record = ctx.runtime_dir().join(".ended").join(&stopped.pod.uid);
    ensure!(record.exists(), "no record for an agent that starts later");
    let refused = stopped.other("hook-sidecar-0", "husk-launcher", &["/bin/hook"]);
    let refused = refused.err().context("a sidecar runs")?;
    expect_contains(&format!("{refused:#}"), &["hook-sidecar-0"])?;
    cri.remove_pod(&stopped.pod)?;
    ensure!(
        !ctx.runtime_dir().join("pods").join(&stopped.pod.uid).exists(),
        "its directory stays"
    );
    c.nothing_left()
}
