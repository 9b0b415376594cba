//! The cases: how each VMM is started, and how a disk is added.

use super::pod::Pod;
use crate::bench_files::BenchFiles;
use crate::cases::named_cases;
use crate::guest::{Guest, SCRIPT, Vmm};
use crate::qmp;
use anyhow::Result;
use serde_json::json;
use std::path::Path;
use std::time::Instant;
use xtask::qmp::Qmp;

named_cases! {
    /// A VMM.
    pub enum Case {
        /// `AddVolume` to the monitor of a VM.
        Husk = "husk",
        /// `device_add` to QEMU's PC.
        Q35 = "qemu-q35",
    }
}

/// Memory of every guest.
pub const MEMORY_MIB: u64 = 256;

/// Host cache mode of every disk: the page cache, so that the host's disk does not affect the times.
pub const CACHE: &str = "writeback";

const GUEST: Guest<'_> = Guest {
    name: "bench-hotplug",
    vcpus: 1,
    mib: MEMORY_MIB,
    append: Some(SCRIPT),
};

impl Case {
    /// The VMM of a guest with a SCSI controller that has no disk yet.
    pub fn ready(self, files: &BenchFiles) -> Result<Vmm> {
        match self {
            Self::Husk => GUEST.husk(files, "", ""),
            Self::Q35 => {
                let mut vmm = GUEST.qemu("q35", files);
                vmm.command.args(["-device", "virtio-scsi-pci,id=scsi"]);
                qmp::listen(&mut vmm, files);
                Ok(vmm)
            }
        }
    }

    /// Connects to the VMM of a running guest.
    pub fn connect(self, files: &BenchFiles) -> Result<Plug> {
        Ok(match self {
            Self::Husk => Plug::Husk(Pod::connect(&GUEST.socket(files))?),
            Self::Q35 => Plug::Qemu(Qmp::connect(&qmp::socket(files))?),
        })
    }
}

/// A connection through which disks are added and removed.
#[derive(Debug)]
pub enum Plug {
    /// Connection to Husk's monitor.
    Husk(Pod),
    /// Connection to QEMU.
    Qemu(Qmp),
}

/// The times of an addition.
#[derive(Debug)]
pub struct Asked {
    /// Request to open the image. Husk opens it with the disk.
    pub image: Instant,
    /// Request to add the disk.
    pub disk: Instant,
    /// Reply to the request.
    pub answered: Instant,
}

impl Plug {
    /// Adds a disk with the given serial number.
    pub fn add(&mut self, serial: &str, image: &Path) -> Result<Asked> {
        match self {
            Self::Husk(pod) => {
                let disk = Instant::now();
                pod.add(serial, image)?;
                Ok(Asked {
                    image: disk,
                    disk,
                    answered: Instant::now(),
                })
            }
            Self::Qemu(qmp) => {
                let file = json!({"driver": "file", "filename": image});
                let node = json!({"driver": "raw", "node-name": serial, "file": file});
                // Husk uses the same address for the first disk.
                let device = json!({
                    "driver": "scsi-hd", "id": serial, "serial": serial, "drive": serial,
                    "bus": "scsi.0", "scsi-id": 0, "lun": 0,
                });
                let asked = Instant::now();
                qmp.execute("blockdev-add", node)?;
                let disk = Instant::now();
                qmp.execute("device_add", device)?;
                Ok(Asked {
                    image: asked,
                    disk,
                    answered: Instant::now(),
                })
            }
        }
    }

    /// Removes the disk, and returns when the image is closed.
    pub fn remove(&mut self, serial: &str) -> Result<()> {
        match self {
            Self::Husk(pod) => pod.remove(serial),
            Self::Qemu(qmp) => {
                qmp.execute("device_del", json!({"id": serial}))?;
                qmp.deleted(serial)?;
                qmp.execute("blockdev-del", json!({"node-name": serial}))?;
                Ok(())
            }
        }
    }
}
