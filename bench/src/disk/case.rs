//! The compared configurations, and how each is started.

use crate::bench_files::BenchFiles;
use crate::cases::{BenchCase, named_cases};
use crate::guest::{Guest, SCRIPT, Vmm};
use crate::peers::Devices;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask::finish::finish;

named_cases! {
    /// A VMM with its disk in one configuration.
    pub enum Case {
        /// Husk's virtio-blk.
        Husk = "husk",
        /// Husk's virtio-scsi.
        HuskScsi = "husk-scsi",
        /// Husk's virtio-blk, with an overlay over a qcow2 image.
        HuskQcow2 = "husk-qcow2",
        /// QEMU's virtio-blk by default: served by its main loop.
        Q35 = "qemu-q35",
        /// The same with an iothread and io_uring.
        Q35Iothread = "qemu-q35-iothread",
        /// QEMU's virtio-scsi by default.
        Q35Scsi = "qemu-q35-scsi",
        /// The same with an iothread and io_uring.
        Q35ScsiIothread = "qemu-q35-scsi-iothread",
        /// QEMU's virtio-blk, with a qcow2 overlay over a qcow2 image.
        Q35Qcow2 = "qemu-q35-qcow2",
        /// Firecracker by default: one system call after the other.
        Firecracker = "firecracker",
        /// The same with io_uring.
        FirecrackerAsync = "firecracker-async",
        /// Cloud Hypervisor.
        CloudHypervisor = "cloud-hypervisor",
    }
}

/// Files that all runs use.
#[derive(Debug)]
pub struct DiskFiles {
    /// Files of every benchmark; the initrd contains the guest's jobs.
    pub common: BenchFiles,
    /// The disk's image, raw.
    pub raw: PathBuf,
    /// The same in qcow2, if a case needs it.
    pub qcow2: Option<PathBuf>,
    /// Number of processors of every guest.
    pub vcpus: u32,
}

/// Memory of every guest: it holds fio's libraries twice while they are unpacked.
pub const MEMORY_MIB: u64 = 512;

/// Host cache mode of every disk: the page cache, so that the disk's own variance does not show.
pub const CACHE: &str = "writeback";

/// Name of Husk's VM.
const NAME: &str = "bench-disk";

impl Case {
    /// True if the disk is a qcow2 image.
    pub fn is_qcow2(self) -> bool {
        matches!(self, Self::HuskQcow2 | Self::Q35Qcow2)
    }

    fn is_husk(self) -> bool {
        matches!(self, Self::Husk | Self::HuskScsi | Self::HuskQcow2)
    }

    /// The VMM of the case.
    pub fn ready(self, files: &DiskFiles) -> Result<Vmm> {
        let guest = Guest {
            name: NAME,
            vcpus: files.vcpus,
            mib: MEMORY_MIB,
            append: Some(SCRIPT),
        };
        if let Some(peer) = self.peer() {
            let devices = Devices {
                disk: Some(&files.raw),
                io_uring: self == Self::FirecrackerAsync,
                tap: None,
            };
            peer.ready(&guest, &files.common, &devices)
        } else if self.is_husk() {
            self.husk(&guest, files)
        } else {
            self.qemu(&guest, files)
        }
    }

    fn husk(self, guest: &Guest<'_>, files: &DiskFiles) -> Result<Vmm> {
        let (devices, spec) = self.manifest(files);
        let mut vmm = guest.husk(&files.common, &devices, &spec)?;
        if self.is_qcow2() {
            let mut volume = std::ffi::OsString::from("data=");
            volume.push(files.qcow2()?);
            vmm.command.arg("--volume").arg(volume);
        }
        Ok(vmm)
    }

    /// Manifest lines for the devices and for the spec.
    fn manifest(self, files: &DiskFiles) -> (String, String) {
        let bus = if self == Self::HuskScsi { "scsi" } else { "virtio" };
        let volume = if self.is_qcow2() {
            "containerDisk: {image: local/data}".to_owned()
        } else {
            format!("hostDisk: {{type: Disk, path: {}}}", files.raw.display())
        };
        // QEMU also has one queue per vCPU.
        let disks = format!("disks: [{{name: data, disk: {{bus: {bus}}}, cache: {CACHE}}}]");
        (
            format!("blockMultiQueue: true\n{disks}"),
            format!("volumes: [{{name: data, {volume}}}]"),
        )
    }

    fn qemu(self, guest: &Guest<'_>, files: &DiskFiles) -> Result<Vmm> {
        let (format, file) = if self.is_qcow2() {
            ("qcow2", files.overlay()?)
        } else {
            ("raw", files.raw.clone())
        };
        let aio = match self {
            Self::Q35Iothread | Self::Q35ScsiIothread => ",aio=io_uring",
            _ => "",
        };
        let drive = format!(
            "if=none,id=data,format={format},cache={CACHE}{aio},file={}",
            file.display()
        );
        let devices: &[&str] = match self {
            Self::Q35Iothread => &[
                "-object",
                "iothread,id=worker",
                "-device",
                "virtio-blk-pci,drive=data,iothread=worker",
            ],
            Self::Q35Scsi => &[
                "-device",
                "virtio-scsi-pci,id=scsi",
                "-device",
                "scsi-hd,drive=data,bus=scsi.0",
            ],
            Self::Q35ScsiIothread => &[
                "-object",
                "iothread,id=worker",
                "-device",
                "virtio-scsi-pci,id=scsi,iothread=worker",
                "-device",
                "scsi-hd,drive=data,bus=scsi.0",
            ],
            _ => &["-device", "virtio-blk-pci,drive=data"],
        };
        let mut vmm = guest.qemu("q35", &files.common);
        vmm.command.args(["-drive", &drive]).args(devices);
        Ok(vmm)
    }
}

impl DiskFiles {
    fn qcow2(&self) -> Result<&Path> {
        self.qcow2.as_deref().context("there is no qcow2 image")
    }

    /// Creates a fresh overlay over the qcow2 image.
    fn overlay(&self) -> Result<PathBuf> {
        let overlay = self.common.folder.join("overlay.qcow2");
        let mut create = Command::new("qemu-img");
        create
            .args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"])
            .arg(self.qcow2()?)
            .arg(&overlay);
        finish(&mut create)?;
        Ok(overlay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> DiskFiles {
        DiskFiles {
            common: BenchFiles::example(Path::new("/files")),
            raw: "/files/data.img".into(),
            qcow2: None,
            vcpus: 3,
        }
    }

    fn words(case: Case) -> String {
        format!("{:?}", case.ready(&files()).expect("a command").command)
    }

    #[test]
    fn qemus_cases_differ_as_their_names_say() {
        let (plain, threaded, scsi) = (words(Case::Q35), words(Case::Q35Iothread), words(Case::Q35Scsi));
        assert!(plain.contains("virtio-blk-pci,drive=data\"") && !plain.contains("aio="));
        assert!(threaded.contains("iothread=worker") && threaded.contains("aio=io_uring"));
        assert!(scsi.contains("scsi-hd,drive=data,bus=scsi.0") && !scsi.contains("aio="));
        for words in [plain, threaded, scsi] {
            assert!(words.contains("cache=writeback") && words.contains("file=/files/data.img"));
            assert!(words.contains("\"-smp\" \"3\""), "{words}");
        }
    }

    #[test]
    fn husks_cases_differ_in_their_manifest() {
        let manifest = |case: Case| {
            let (devices, spec) = case.manifest(&files());
            devices + &spec
        };
        let manifests = [Case::Husk, Case::HuskScsi, Case::HuskQcow2].map(manifest);
        assert!(manifests[0].contains("bus: virtio") && manifests[0].contains("path: /files/data.img"));
        assert!(manifests[1].contains("bus: scsi") && manifests[1].contains("path: /files/data.img"));
        assert!(manifests[2].contains("containerDisk") && !manifests[2].contains("hostDisk"));
        assert!(manifests.iter().all(|text| text.contains("cache: writeback")));
    }
}
