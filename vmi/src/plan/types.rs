//! The VM a manifest describes, with every default applied and every source resolved to what the caller has.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::disk::{DiskPlan, ScsiController};
use super::nic::NicPlan;
use crate::field::Note;

/// What the caller can offer to a VM, beside the manifest.
#[derive(Clone, Debug, Default)]
pub struct PodResources {
    /// Where the data of a volume is, by volume name: an image file, a block device or a directory. A containerDisk
    /// may also be an archive; a configMap, secret, downwardAPI or serviceAccount, cloud-init's Secrets and
    /// `kernel-boot-volume` are directories.
    pub volumes: BTreeMap<String, PathBuf>,
    /// A kernel from outside the manifest; it takes precedence over `firmware.kernelBoot` and the disks.
    pub kernel: Option<KernelOverride>,
    /// The system UUID to use when the manifest has none.
    pub uuid: Uuid,
    /// Now, in seconds since 1970-01-01T00:00:00Z: decides the offset of `clock.timezone`.
    pub now_unix_seconds: i64,
}

/// A kernel given on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelOverride {
    /// The kernel. Without one, only the command line is taken, and it is added to whatever kernel the manifest boots.
    pub kernel: Option<PathBuf>,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub append: Option<String>,
}

/// A virtual machine, ready to be built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VmPlan {
    /// The VMI's name, a DNS-1123 subdomain.
    pub name: String,
    /// The VMI's namespace, a DNS-1123 label; `default` if the manifest has none.
    pub namespace: String,
    /// The guest's host name, at most 63 characters.
    pub hostname: String,
    /// The domain that the guest is in, below the namespace's.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub subdomain: Option<String>,
    /// The VMI's own UID, which a cluster gives it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub uid: Option<String>,
    /// SMBIOS system UUID.
    pub uuid: Uuid,
    /// SMBIOS system serial number.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub serial: Option<String>,
    /// vCPUs and how the guest sees them.
    pub topology: Topology,
    /// Guest memory.
    pub memory: Memory,
    /// Disks in the guest's order.
    pub disks: Vec<DiskPlan>,
    /// The SCSI controller; none is asked for where `disableHotplug` is set and no disk needs it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scsi: Option<ScsiController>,
    /// Network interfaces in the manifest's order.
    pub nics: Vec<NicPlan>,
    /// What is booted.
    pub boot: BootPlan,
    /// Give the guest a virtio entropy device.
    pub rng: bool,
    /// Give the guest a virtio memory balloon.
    pub balloon: bool,
    /// Give the guest a serial port (ttyS0).
    pub serial_console: bool,
    /// Describe the machine by ACPI.
    pub acpi: bool,
    /// What the guest's real-time clock shows, in seconds ahead of UTC.
    pub rtc_offset_seconds: i64,
    /// Seconds between the ACPI power button and the kill when the VM is stopped; 0 kills at once.
    pub grace_period_seconds: u64,
    /// Leave the vCPUs stopped until the VM is resumed.
    pub start_paused: bool,
    /// What the manifest asks for that is met differently; one warning each.
    pub notes: Vec<Note>,
}

/// vCPU topology; every count is at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Sockets.
    pub sockets: u32,
    /// Cores in a socket.
    pub cores: u32,
    /// Threads in a core.
    pub threads: u32,
}

impl Topology {
    /// The number of vCPUs, saturating; a plan has at most 254.
    pub fn vcpus(self) -> u32 {
        self.sockets
            .saturating_mul(self.cores)
            .saturating_mul(self.threads)
    }
}

/// Guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Memory {
    /// Size in bytes, a multiple of the page size that backs it (4096 without huge pages).
    pub guest_bytes: u64,
    /// Back it by huge pages of this size in bytes (2 MiB or 1 GiB), reserved at start.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub hugepage_bytes: Option<u64>,
}

/// What is booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BootPlan {
    /// A kernel from the host.
    #[serde(rename_all = "camelCase")]
    Kernel {
        /// bzImage or ELF with a PVH entry.
        kernel: KernelFile,
        /// Initial RAM disk.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        initrd: Option<KernelFile>,
        /// The command line as given; may be empty.
        command_line: String,
        /// What ends it, where the caller added that to the manifest's.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        append: Option<String>,
    },
    /// The kernel that the first bootable disk carries.
    #[serde(rename_all = "camelCase")]
    Disks {
        /// Names of the disks to try, in order; empty if the VM has none.
        order: Vec<String>,
        /// Words to add to the command line found on the disk.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        append: Option<String>,
    },
}

/// A kernel or initrd file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum KernelFile {
    /// A path the caller gave.
    Path(PathBuf),
    /// A file of `kernelBoot.container`: what is below the directory came from a container image, so it must be resolved
    /// strictly beneath it, following no symbolic link out of it.
    Beneath(FileRef),
}

/// A file named by a manifest inside a directory the caller gave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRef {
    /// The directory.
    pub dir: PathBuf,
    /// The file, relative to it; holds no `.`, `..` or empty component.
    pub path: PathBuf,
}
