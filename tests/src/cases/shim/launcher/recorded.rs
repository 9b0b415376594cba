//! The pod that virt-controller 1.9.0 wrote for the VMI `default/testvmi`.

use crate::harness::containerd::image::name;
use crate::harness::context::{CommandResult, TestContext};
use crate::harness::cri::{Container, Cri, Pod, api};
use crate::harness::manifest::Manifest;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::time::Duration;

const POD: &str = include_str!("../../../../manifests/launcher-pod.json");
/// UID of the VMI in the recorded pod.
const UID: &str = "98fa01d7-91c7-42f7-bed0-10db5ef0a33f";
/// `runAsUser`, `runAsGroup` and `fsGroup` of the recorded pod.
const QEMU: u32 = 107;
/// Time limit of a change of a container's state.
const SOON: Duration = Duration::from_secs(20);

/// The recorded pod on this node.
pub struct Launcher<'s> {
    ctx: &'s TestContext,
    cri: &'s Cri,
    pub pod: Pod,
    pub object: Value,
}

impl<'s> Launcher<'s> {
    pub fn new(ctx: &'s TestContext, cri: &'s Cri, name: &str) -> Result<Self> {
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
                    let disk = folder.join("disk.img");
                    std::fs::copy(self.ctx.path("fs-disk.img"), &disk)?;
                    give_to_group(&folder, 0, 0o2770)?;
                    give_to_group(&disk, QEMU, 0o660)?;
                }
                host.host_path = folder.display().to_string();
            }
            mounts.push(host);
        }
        Ok(mounts)
    }

    /// The container `name` of the recorded pod, started.
    pub fn start(&self, name: &str, more: &[api::Mount], attempt: u32) -> Result<String> {
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
                user: Some(QEMU),
                ..Container::default()
            },
        )
    }

    /// Another container of a launcher pod.
    pub fn other(&self, name: &str, image: &str, command: &[&str]) -> Result<String> {
        let container = Container {
            name,
            image,
            command,
            user: Some(QEMU),
            ..Container::default()
        };
        self.cri.start(&self.pod, &container)
    }

    pub fn log(&self, name: &str) -> Result<String> {
        Ok(std::fs::read_to_string(
            self.cri.logs(self.pod.name()).join(name),
        )?)
    }

    pub fn vm(&self) -> String {
        format!("pods/{}", self.pod.uid)
    }

    /// Sends the VMI, as the node's agent does.
    pub fn sync(&self, vmi: &Value) -> Result<CommandResult> {
        let file = self.ctx.path("launcher-vmi.json");
        std::fs::write(&file, vmi.to_string())?;
        self.ctx
            .run(&["sync", &self.vm(), "-f", &file.display().to_string()])
    }

    pub fn exits(&self, id: &str, status: i32) -> Result<()> {
        let exit = self.cri.wait(id, SOON)?;
        ensure!(exit == status, "exit status {exit}, not {status}");
        Ok(())
    }

    pub fn runs(&self, id: &str) -> Result<()> {
        let status = self.cri.status(id)?;
        ensure!(
            status.state() == api::ContainerState::ContainerRunning,
            "{status:?}"
        );
        Ok(())
    }
}

/// Gives a file to the user `owner`, and to `fsGroup` as the kubelet does.
fn give_to_group(path: &Path, owner: u32, mode: u32) -> Result<()> {
    chown(path, Some(owner), Some(QEMU))?;
    Ok(std::fs::set_permissions(
        path,
        std::fs::Permissions::from_mode(mode),
    )?)
}

/// Name of an image in the tests for a reference in the recorded pod.
fn short(reference: &str) -> &str {
    let name = reference.rsplit('/').next().unwrap_or(reference);
    name.split(':').next().unwrap_or(name)
}

pub fn image_spec(reference: &str) -> api::ImageSpec {
    api::ImageSpec {
        image: name(short(reference)),
    }
}

/// The VMI of the recorded pod, with a kernel that runs `words`.
pub fn vmi(words: &str) -> Result<Value> {
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
