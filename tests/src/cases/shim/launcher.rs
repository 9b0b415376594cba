//! KubeVirt's launcher pods, as virt-controller renders them. `tests/manifests/launcher-pod.json` is one that
//! virt-controller 1.9.0 wrote, for the VMI `default/testvmi`.

use super::ctr::LIMIT;
use super::pod::node;
use crate::harness::containerd::image::{Image, name};
use crate::harness::containerd::{BRIDGE, Containerd, Version};
use crate::harness::context::{TestContext, expect_contains};
use crate::harness::cri::{Container, Cri, NAMESPACE, Pod, api};
use crate::harness::manifest::Manifest;
use crate::harness::program::Session;
use crate::harness::{Case, until};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::Path;
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

const POD: &str = include_str!("../../../manifests/launcher-pod.json");
/// UID of the VMI in the recorded pod.
const UID: &str = "98fa01d7-91c7-42f7-bed0-10db5ef0a33f";
const KERNEL_BOOT: &str = "/var/run/kubevirt-kernel-boot";
/// The command of a volume container that only names its image.
const NO_OP: &[&str] = &["/container-disk-binary/usr/bin/container-disk", "--no-op"];
/// Time limit of a change of a container's state.
const SOON: Duration = Duration::from_secs(20);

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

/// The recorded pod on this node.
struct Launcher<'s> {
    ctx: &'s TestContext,
    cri: &'s Cri,
    pod: Pod,
    object: Value,
}

impl<'s> Launcher<'s> {
    fn new(ctx: &'s TestContext, cri: &'s Cri, name: &str) -> Result<Self> {
        let object: Value = serde_json::from_str(POD)?;
        let mut disk = std::fs::File::create(ctx.path("fs-disk.img"))?;
        std::io::Write::write_all(&mut disk, &[0; 1 << 20])?;
        Ok(Self {
            ctx,
            cri,
            pod: cri.pod(name, "husk", &[])?,
            object,
        })
    }

    /// The mounts of a container of the recorded pod, without the block device.
    fn mounts(&self, container: &Value) -> Result<Vec<api::Mount>> {
        let volumes = self.object["spec"]["volumes"].as_array().context("no volumes")?;
        let mut mounts = Vec::new();
        for mount in container["volumeMounts"].as_array().into_iter().flatten() {
            let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]);
            let volume = volume.with_context(|| format!("no volume {}", mount["name"]))?;
            let name = mount["name"].as_str().context("no name")?;
            let mut host = api::Mount {
                container_path: mount["mountPath"].as_str().context("no path")?.to_owned(),
                readonly: mount["readOnly"] == true,
                ..api::Mount::default()
            };
            if let Some(reference) = volume["image"]["reference"].as_str() {
                host.image = Some(image_spec(reference));
            } else {
                let folder = self.ctx.path(&format!("volumes-{}/{name}", self.pod.uid));
                std::fs::create_dir_all(&folder)?;
                if volume.get("persistentVolumeClaim").is_some() {
                    std::fs::copy(self.ctx.path("fs-disk.img"), folder.join("disk.img"))?;
                }
                host.host_path = folder.display().to_string();
            }
            mounts.push(host);
        }
        Ok(mounts)
    }

    /// The container `name` of the recorded pod, started.
    fn start(&self, name: &str, more: &[api::Mount], attempt: u32) -> Result<String> {
        let spec = &self.object["spec"];
        let all = ["initContainers", "containers"].map(|kind| spec[kind].as_array().cloned());
        let container = all
            .into_iter()
            .flatten()
            .flatten()
            .find(|container| container["name"] == name)
            .with_context(|| format!("no container {name}"))?;
        let command = ["command", "args"].map(|key| container[key].as_array().cloned());
        let command: Vec<String> = command
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|word| word.as_str().map(str::to_owned))
            .collect();
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let mounts = [self.mounts(&container)?, more.to_vec()].concat();
        let image = container["image"].as_str().context("no image")?;
        self.cri.start(
            &self.pod,
            &Container {
                name,
                image: short(image),
                command: &command,
                mounts: &mounts,
                attempt,
                ..Container::default()
            },
        )
    }

    /// Another container of a launcher pod.
    fn other(&self, name: &str, image: &str, command: &[&str]) -> Result<String> {
        let container = Container {
            name,
            image,
            command,
            ..Container::default()
        };
        self.cri.start(&self.pod, &container)
    }

    fn log(&self, name: &str) -> Result<String> {
        Ok(std::fs::read_to_string(
            self.cri.logs(&self.pod_name()).join(name),
        )?)
    }

    fn pod_name(&self) -> String {
        self.pod.name().to_owned()
    }

    fn vm(&self) -> String {
        format!("pods/{}", self.pod.uid)
    }

    /// Sends the VMI, as the node's agent does.
    fn sync(&self, vmi: &Value) -> Result<crate::harness::context::CommandResult> {
        let file = self.ctx.path("launcher-vmi.json");
        std::fs::write(&file, vmi.to_string())?;
        self.ctx
            .run(&["sync", &self.vm(), "-f", &file.display().to_string()])
    }

    fn exits(&self, id: &str, status: i32) -> Result<()> {
        let exit = self.cri.wait(id, SOON)?;
        ensure!(exit == status, "exit status {exit}, not {status}");
        Ok(())
    }

    fn runs(&self, id: &str) -> Result<()> {
        let status = self.cri.status(id)?;
        ensure!(
            status.state() == api::ContainerState::ContainerRunning,
            "{status:?}"
        );
        Ok(())
    }
}

/// Name of an image in the tests for a reference in the recorded pod.
fn short(reference: &str) -> &str {
    let name = reference.rsplit('/').next().unwrap_or(reference);
    name.split(':').next().unwrap_or(name)
}

fn image_spec(reference: &str) -> api::ImageSpec {
    api::ImageSpec {
        image: name(short(reference)),
    }
}

/// The VMI of the recorded pod, with a kernel that runs `words`.
fn vmi(words: &str) -> Result<Value> {
    let manifest = Manifest::new("testvmi")
        .memory("128Mi")
        .kernel_boot(words)
        .disk("root", json!({"containerDisk": {"image": "any"}}))
        .disk("fs", json!({"persistentVolumeClaim": {"claimName": "fspvc"}}));
    let mut vmi: Value = serde_json::from_str(&manifest.json())?;
    vmi["metadata"]["uid"] = UID.into();
    vmi["metadata"]["namespace"] = "default".into();
    Ok(vmi)
}

/// With the gate ImageVolume: the kubelet mounts the images of volumes.
fn image_volumes(ctx: &TestContext, c: &Containerd<'_>, cri: &Cri) -> Result<()> {
    let pod = Launcher::new(ctx, cri, "images")?;
    let console_log = pod.start("guest-console-log", &[], 0)?;
    let root = pod.start("volumeroot", &[], 0)?;
    pod.exits(&root, 0)?;
    let kernel = api::Mount {
        container_path: KERNEL_BOOT.to_owned(),
        readonly: true,
        image: Some(image_spec("kernel")),
        ..api::Mount::default()
    };
    let compute = pod.start("compute", &[kernel], 0)?;
    pod.runs(&compute)?;
    pod.runs(&console_log)?;

    let mut other = vmi("disks,button,shell")?;
    other["metadata"]["uid"] = "another".into();
    let refused = pod.sync(&other)?;
    ensure!(refused.status == 2, "{}: {}", refused.status, refused.text);
    expect_contains(&refused.text, &["metadata.uid: \"another\" is another VM"])?;
    let mut broken = vmi("disks,button,shell")?;
    broken["spec"]["volumes"][1]["persistentVolumeClaim"] = json!({"claimName": "fspvc"});
    broken["spec"]["volumes"][1]["name"] = "gone".into();
    broken["spec"]["domain"]["devices"]["disks"][1]["name"] = "gone".into();
    let refused = pod.sync(&broken)?;
    ensure!(refused.status == 2, "{}: {}", refused.status, refused.text);
    expect_contains(&refused.text, &["spec.volumes[1]", "no data for volume \"gone\""])?;
    pod.runs(&compute)?;

    let started = pod.sync(&vmi("disks,button,shell")?)?;
    ensure!(started.status == 0, "{}: {}", started.status, started.text);
    let console = Session::on_terminal(ctx.husk(&["console", &pod.vm()]), &ctx.log("images.console.log"))?;
    let shell = crate::harness::guest::Shell::small_on(&console)?;
    let sizes = shell.ok("cat /sys/block/vda/size /sys/block/vdb/size")?;
    ensure!(sizes == "2048\n2048", "{sizes}");
    let first = shell.ok("head -c 1 /dev/vda | hexdump -e '1/1 \"%d\"'")?;
    ensure!(first == "7", "not the containerDisk: {first}");

    // The console is printed by its own container alone.
    shell.ok("echo marker-$((40 + 2))")?;
    until(|| Ok(pod.log("guest-console-log.log")?.contains("marker-42")))?;
    let log = pod.log("compute.log")?;
    ensure!(!log.contains("marker-42"), "compute prints the console: {log}");
    expect_contains(&log, &["the VMI came"])?;

    // virt-freezer without an agent has nothing to do; a probe fails.
    let freezer = [
        "/usr/bin/virt-freezer",
        "--freeze",
        "--name",
        "testvmi",
        "--namespace",
        "default",
    ];
    ensure!(cri.exec(&compute, &freezer)?.0 == 0);
    let (status, said) = cri.exec(&compute, &["virt-probe", "--guestAgentPing"])?;
    ensure!(status == 1 && said.contains("guest agent"), "{status}: {said}");
    ensure!(cri.exec(&compute, &["/bin/sh"]).is_err(), "exec of a shell");

    // Killed alone, it restarts and goes on.
    cri.stop(&console_log, Duration::ZERO)?;
    pod.exits(&console_log, 137)?;
    let again = pod.start("guest-console-log", &[], 1)?;
    shell.ok("echo marker-$((50 + 2))")?;
    until(|| Ok(pod.log("guest-console-log.1.log")?.contains("marker-52")))?;
    drop(console);

    cri.stop(&compute, Duration::from_secs(60))?;
    pod.exits(&compute, 0)?;
    pod.runs(&again)?;
    cri.stop(&again, Duration::from_secs(10))?;
    pod.exits(&again, 0)?;
    cri.remove_pod(&pod.pod)?;
    c.nothing_left()
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
    let early = pod.sync(&vmi("button")?)?;
    ensure!(early.status == 2, "{}: {}", early.status, early.text);
    expect_contains(
        &early.text,
        &["no container of this pod provides volume \"root\" yet"],
    )?;
    let mut volumes = Vec::new();
    for (volume, image) in [("volumeroot", "debian"), ("volumekernel-boot-volume", "kernel")] {
        let words = [
            "/usr/bin/container-disk",
            "--copy-path",
            "/var/run/kubevirt/container-disks/disk",
        ];
        volumes.push(pod.other(volume, image, &words)?);
    }
    let started = pod.sync(&vmi("button")?)?;
    ensure!(started.status == 0, "{}: {}", started.status, started.text);
    let inspected = ctx.json(&["inspect", &pod.vm(), "-o", "json"])?;
    ensure!(inspected["phase"] == "Running", "{inspected}");
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
    let refused = stopped.other("hook-sidecar-0", "husk-launcher", &["/bin/hook"]);
    let refused = refused.err().context("a sidecar runs")?;
    expect_contains(&format!("{refused:#}"), &["hook-sidecar-0"])?;
    cri.remove_pod(&stopped.pod)?;
    ensure!(
        !Path::new("/run/husk/pods").join(&stopped.pod.uid).exists(),
        "its directory stays"
    );
    c.nothing_left()
}
