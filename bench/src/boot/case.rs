//! The compared configurations, and how each is started.

use crate::bench_files::BenchFiles;
use crate::cases::BenchCase;
use crate::guest::{self, Guest};
use crate::peers::Peer;
use crate::vmm::Vmm;
use anyhow::{Context, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Boot source of a guest.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// The kernel and initrd of the benchmark, with this command line.
    Kernel(&'a str),
    /// The kernel and the system on this disk.
    Disk(&'a Path),
}

/// Memory of a guest that boots a kernel and an initrd.
pub const KERNEL_MIB: u64 = 256;

/// Memory of a guest that boots a whole Debian.
pub const DISK_MIB: u64 = 512;

/// Name of Husk's VM.
const NAME: &str = "bench-boot";

impl Vmm {
    /// The cases that boot a disk.
    pub const WITH_DISK: [Self; 2] = [Self::Husk, Self::Q35];

    /// Word of `husk.do=` that ends the guest and with it the VMM.
    pub fn off(self) -> &'static str {
        match self {
            // They have no ACPI state S5, and take a reset as the end.
            Self::Peer(Peer::Firecracker) | Self::Floor => "reboot",
            _ => "poweroff",
        }
    }

    /// The case's name where the guest boots a disk.
    pub fn disk_name(self) -> String {
        format!("{}-disk", self.name())
    }

    /// The VMM for a guest of one vCPU.
    pub fn with_source(self, files: &BenchFiles, source: Source<'_>) -> Result<guest::Vmm> {
        let (mib, append) = match source {
            Source::Kernel(append) => (KERNEL_MIB, Some(append)),
            Source::Disk(_) => (DISK_MIB, None),
        };
        let guest = Guest {
            name: NAME,
            vcpus: 1,
            mib,
            append,
        };
        match (source, self) {
            (Source::Kernel(_), _) => self.ready(&guest, files),
            (Source::Disk(disk), Self::Husk) => guest.husk(
                files,
                "disks: [{name: root, disk: {bus: virtio}}]",
                &format!(
                    "volumes: [{{name: root, hostDisk: {{type: Disk, path: {}}}}}]",
                    disk.display()
                ),
            ),
            (Source::Disk(disk), _) => {
                let mut vmm = guest.qemu("q35", files);
                let drive = format!(
                    "if=none,id=root,format=raw,aio=io_uring,cache={},file={}",
                    cache(disk)?,
                    disk.display()
                );
                vmm.command
                    .args(["-drive", &drive])
                    .args(["-device", "virtio-blk-pci,drive=root,bootindex=0"]);
                Ok(vmm)
            }
        }
    }
}

/// Husk's default cache mode for this file: none where the file system has O_DIRECT.
fn cache(disk: &Path) -> Result<&'static str> {
    let direct = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(disk);
    match direct {
        Ok(_) => Ok("none"),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok("writethrough"),
        Err(error) => Err(error).with_context(|| format!("cannot open {}", disk.display())),
    }
}
