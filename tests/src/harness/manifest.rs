//! Manifests, and the options of `husk run` for them.

use super::containerd::image::{INITRD, KERNEL};
use super::context::TestContext;
use super::images::Small;
use super::pod::Pod;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::Path;

/// Start of a guest's command line. In the lab each character on the serial port is an exit of a nested guest, and the
/// kernel's log takes more than half of a boot.
const KERNEL_ARGS: &str = "console=ttyS0 quiet";

/// A VirtualMachineInstance to run.
#[derive(Debug, Clone)]
pub struct Manifest {
    name: String,
    object: Value,
    arguments: Vec<OsString>,
}

impl Manifest {
    /// Creates a VM with one vCPU, 256 MiB and no devices.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            object: json!({
                "apiVersion": "kubevirt.io/v1",
                "kind": "VirtualMachineInstance",
                "metadata": {"name": name},
                "spec": {
                    "domain": {
                        "cpu": {"cores": 1},
                        "resources": {"requests": {"memory": "256Mi"}},
                        "devices": {"autoattachPodInterface": false, "disks": []},
                    },
                    "volumes": [],
                },
            }),
            arguments: Vec::new(),
        }
    }

    /// Name of the VM.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets the field at the JSON pointer `path` below `spec`, whose parent must exist.
    pub fn set(mut self, path: &str, value: Value) -> Self {
        let (parent, field) = path.rsplit_once('/').unwrap_or(("", path));
        if let Some(parent) = self.object["spec"].pointer_mut(parent) {
            parent[field] = value;
        }
        self
    }

    /// Sets a field of the status, as a cluster does.
    pub fn status(mut self, field: &str, value: Value) -> Self {
        self.object["status"][field] = value;
        self
    }

    /// Sets the CPU topology.
    pub fn cpu(self, sockets: u32, cores: u32, threads: u32) -> Self {
        self.set(
            "/domain/cpu",
            json!({"sockets": sockets, "cores": cores, "threads": threads}),
        )
    }

    /// Sets the memory, a Kubernetes quantity.
    pub fn memory(self, quantity: &str) -> Self {
        self.set("/domain/resources/requests/memory", json!(quantity))
    }

    /// Adds a disk on bus virtio with the volume source `source`.
    pub fn disk(self, name: &str, source: Value) -> Self {
        self.device(name, virtio(), source)
    }

    /// Adds an entry of `disks`, which is `device` without its name, with the volume source `source`.
    pub fn device(self, name: &str, device: Value, source: Value) -> Self {
        self.entry(name, device).source(name, source)
    }

    /// Adds a CD-ROM drive. Without a volume of its name it is empty.
    pub fn drive(self, name: &str) -> Self {
        self.entry(name, json!({"cdrom": {"bus": "scsi"}}))
    }

    fn entry(mut self, name: &str, mut disk: Value) -> Self {
        disk["name"] = json!(name);
        push(&mut self.object["spec"]["domain"]["devices"]["disks"], disk);
        self
    }

    /// Adds a volume with this source.
    pub fn source(mut self, name: &str, mut volume: Value) -> Self {
        volume["name"] = json!(name);
        push(&mut self.object["spec"]["volumes"], volume);
        self
    }

    /// Adds the image at `path` as a disk on bus virtio with the claim `claim`.
    pub fn claim(self, name: &str, claim: &str, path: &Path) -> Self {
        self.disk(name, json!({"persistentVolumeClaim": {"claimName": claim}}))
            .volume(name, path)
    }

    /// Adds the image at `path` as a containerDisk: the guest writes into an overlay.
    pub fn container_disk(self, name: &str, path: &Path) -> Self {
        self.container_disk_as(name, virtio(), path)
    }

    /// The same with another entry of `disks`.
    pub fn container_disk_as(self, name: &str, device: Value, path: &Path) -> Self {
        let image = format!("local/{name}");
        self.device(name, device, json!({"containerDisk": {"image": image}}))
            .volume(name, path)
    }

    /// Adds an empty disk of the given capacity.
    pub fn empty_disk(self, name: &str, capacity: &str) -> Self {
        self.empty_disk_as(name, virtio(), capacity)
    }

    /// The same with another entry of `disks`.
    pub fn empty_disk_as(self, name: &str, device: Value, capacity: &str) -> Self {
        self.device(name, device, json!({"emptyDisk": {"capacity": capacity}}))
    }

    /// Adds a NoCloud disk with the given user data.
    pub fn cloud_init(self, user_data: &str) -> Self {
        self.disk("cloudinit", json!({"cloudInitNoCloud": {"userData": user_data}}))
    }

    /// Adds an interface with the given binding on the network `source`, both as in a manifest.
    pub fn interface(mut self, name: &str, binding: Value, source: Value) -> Self {
        let spec = &mut self.object["spec"];
        let (mut interface, mut network) = (binding, source);
        interface["name"] = json!(name);
        network["name"] = json!(name);
        for (place, entry) in [("/domain/devices/interfaces", interface), ("/networks", network)] {
            let (parent, field) = place.rsplit_once('/').unwrap_or_default();
            if let Some(parent) = spec.pointer_mut(parent) {
                if parent[field].is_null() {
                    parent[field] = json!([]);
                }
                push(&mut parent[field], entry);
            }
        }
        self
    }

    /// Adds an interface with the given binding on the pod's own network.
    pub fn pod_interface(self, binding: Value) -> Self {
        self.interface("default", binding, json!({"pod": {}}))
    }

    /// Runs the VM in `pod`, whose network it has by the bridge binding.
    pub fn bridged(self, pod: &Pod<'_>) -> Self {
        self.pod_interface(json!({"bridge": {}})).netns(&pod.netns.path())
    }

    /// Runs the VM in the pod whose network namespace is at `path`.
    pub fn netns(self, path: &Path) -> Self {
        self.argument("--netns").argument(path)
    }

    /// Assigns the file `path` to the volume `name`.
    pub fn volume(self, name: &str, path: &Path) -> Self {
        let mut word = OsString::from(format!("{name}="));
        word.push(path);
        self.argument("--volume").argument(word)
    }

    /// Boots the small image, which runs `words`: see its `/init`.
    pub fn small(self, image: &Small, words: &str) -> Self {
        self.small_with(image, words, "")
    }

    /// The same with more words on the kernel's command line.
    pub fn small_with(self, image: &Small, words: &str, append: &str) -> Self {
        self.argument("--kernel")
            .argument(&image.kernel)
            .argument("--initrd")
            .argument(&image.initrd)
            .argument("--append")
            .argument(format!("{KERNEL_ARGS} husk.do={words} {append}").trim_end())
    }

    /// Adds an argument for `husk run`.
    pub fn argument(mut self, word: impl Into<OsString>) -> Self {
        self.arguments.push(word.into());
        self
    }

    /// Boots the kernel in the image of a VM's container: see `Image::kernel`.
    pub fn kernel_boot(self, words: &str) -> Self {
        self.set(
            "/domain/firmware",
            json!({"kernelBoot": {
                "kernelArgs": format!("{KERNEL_ARGS} husk.do={words}"),
                "container": {"image": "local/kernel", "kernelPath": KERNEL, "initrdPath": INITRD},
            }}),
        )
    }

    /// The object, as JSON.
    pub fn json(&self) -> String {
        self.object.to_string()
    }

    /// Writes the manifest and returns the arguments of `husk`, including `run` and the file.
    pub fn run_words(&self, ctx: &TestContext) -> Result<Vec<OsString>> {
        let path = ctx.path(&format!("{}.yaml", self.name));
        let text = serde_json::to_string_pretty(&self.object)?;
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        let mut words = vec!["run".into(), path.into()];
        words.extend(self.arguments.iter().cloned());
        Ok(words)
    }
}

/// An entry of `disks` without its name.
fn virtio() -> Value {
    json!({"disk": {"bus": "virtio"}})
}

fn push(list: &mut Value, value: Value) {
    if let Some(list) = list.as_array_mut() {
        list.push(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_has_a_volume_and_its_file() {
        let manifest = Manifest::new("a")
            .cpu(1, 2, 2)
            .memory("1Gi")
            .container_disk("root", Path::new("/r"));
        let spec = &manifest.object["spec"];
        assert_eq!(spec["domain"]["cpu"]["threads"], 2);
        assert_eq!(spec["domain"]["resources"]["requests"]["memory"], "1Gi");
        assert_eq!(spec["domain"]["devices"]["disks"][0]["name"], "root");
        assert_eq!(spec["volumes"][0]["containerDisk"]["image"], "local/root");
        assert_eq!(manifest.arguments, ["--volume", "root=/r"]);
    }

    #[test]
    fn an_interface_has_a_network() {
        let manifest = Manifest::new("a").pod_interface(json!({"bridge": {}})).interface(
            "red",
            json!({"bridge": {}}),
            json!({"multus": {"networkName": "red"}}),
        );
        let spec = &manifest.object["spec"];
        assert_eq!(spec["networks"][0], json!({"name": "default", "pod": {}}));
        assert_eq!(spec["networks"][1]["multus"]["networkName"], "red");
        let interfaces = &spec["domain"]["devices"]["interfaces"];
        assert_eq!(interfaces[1], json!({"name": "red", "bridge": {}}));
    }
}
