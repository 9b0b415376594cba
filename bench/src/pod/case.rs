//! The compared configurations, and how each is started.

use super::containerd::{Containerd, NAMESPACE};
use super::image;
use crate::bench_files::BenchFiles;
use crate::cases::BenchCase;
use crate::guest::{Guest, Vmm};
use anyhow::Result;
use serde_json::json;
use std::path::Path;
use std::process::Command;

/// A way to start the same guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Case {
    /// A pod that containerd starts.
    Husk,
    /// `husk run`, with the kernel and initrd of the pod's image.
    HuskRun,
    /// QEMU's q35, with the same.
    Q35,
}

/// Number of processors of every guest.
pub const VCPUS: u32 = 1;

/// Memory of every guest.
pub const MEMORY_MIB: u64 = 256;

/// Command line of every guest, which stays idle until its power button is pressed.
pub const APPEND: &str = "console=ttyS0 quiet husk.do=button";

const RUNTIME: &str = "io.containerd.husk.v2";

impl BenchCase for Case {
    fn name(self) -> &'static str {
        match self {
            Self::Husk => "husk",
            Self::HuskRun => "husk-run",
            Self::Q35 => "qemu-q35",
        }
    }
}

impl Case {
    /// All cases, the pod first.
    pub const ALL: [Self; 3] = [Self::Husk, Self::HuskRun, Self::Q35];

    /// The cases of which many guests are started at once.
    pub const MANY: [Self; 2] = [Self::Husk, Self::Q35];

    /// The cgroup of the VMM below the hierarchy's root: `ctr` derives a container's cgroup from its namespace and
    /// name.
    pub fn group(name: &str) -> String {
        format!("{NAMESPACE}/{name}")
    }

    /// The cgroup of the shim.
    pub fn shim_group(name: &str) -> String {
        format!("{NAMESPACE}/{name}-shim")
    }

    /// Commands that start and end a guest of the given name. The serial line of a pod is the FIFO `line`.
    pub fn ready(self, files: &BenchFiles, containerd: &Containerd, name: &str, line: &Path) -> Result<Vmm> {
        let guest = Guest {
            name,
            vcpus: VCPUS,
            mib: MEMORY_MIB,
            append: Some(APPEND),
        };
        Ok(match self {
            Self::Husk => guest.vmm(files, run(containerd, name, line)),
            Self::HuskRun => guest.husk(files, "", "")?,
            Self::Q35 => guest.qemu("q35", files),
        })
    }
}

fn run(containerd: &Containerd, name: &str, line: &Path) -> Command {
    let annotation = format!("husk.io/vmi={}", object(name));
    let log = format!("file://{}", line.display());
    containerd.command(&[
        "run",
        "--detach",
        "--runtime",
        RUNTIME,
        "--annotation",
        &annotation,
        "--log-uri",
        &log,
        image::NAME,
        name,
    ])
}

/// The VirtualMachineInstance, which differs from that of [`Guest::husk`] only in the kernel's location.
fn object(name: &str) -> String {
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {"name": name},
        "spec": {"domain": {
            "cpu": {"cores": VCPUS},
            "memory": {"guest": format!("{MEMORY_MIB}Mi")},
            "devices": {"autoattachMemBalloon": false, "autoattachPodInterface": false},
            "firmware": {"kernelBoot": {
                "kernelArgs": APPEND,
                "container": {"image": image::NAME, "kernelPath": image::KERNEL, "initrdPath": image::INITRD},
            }},
        }},
    })
    .to_string()
}
