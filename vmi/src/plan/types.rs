//! The plan of a VM, with all defaults applied and all sources resolved.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::credentials::CredentialsPlan;
use super::disk::{DiskPlan, ScsiController};
use super::nic::NicPlan;
use crate::field::Warning;

/// Resources that the caller provides in addition to the manifest.
#[derive(Clone, Debug, Default)]
pub struct PodResources {
    /// Path of the data by volume name: an image file, a block device or a directory; for a containerDisk also an
    /// archive; for configMap, secret, downwardAPI, serviceAccount, Secrets of cloud-init, `kernel-boot-volume` and
    /// Secrets of access credentials ([`credential_volume`](super::credential_volume)) a directory.
    pub volumes: BTreeMap<String, PathBuf>,
    /// Files of cloud-init's Secrets by volume name, instead of a directory in `volumes`: the Secret's key and the path
    /// of its value.
    pub seed_files: BTreeMap<String, Vec<(String, PathBuf)>>,
    /// Kernel that takes precedence over `firmware.kernelBoot` and the disks.
    pub kernel: Option<KernelOverride>,
    /// System UUID for manifests without one.
    pub uuid: Uuid,
    /// Current time in seconds since 1970-01-01T00:00:00Z, for the offset of `clock.timezone`.
    pub now_unix_seconds: i64,
}

/// A kernel given on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelOverride {
    /// The kernel. Without one, `append` is added to the command line of the kernel that the manifest boots.
    pub kernel: Option<PathBuf>,
    /// The initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    pub append: Option<String>,
}

/// Complete description of a VM to build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VmPlan {
    /// The VMI's name, a DNS-1123 subdomain.
    pub name: String,
    /// The VMI's namespace, a DNS-1123 label; `default` if the manifest has none.
    pub namespace: String,
    /// The guest's host name, at most 63 characters.
    pub hostname: String,
    /// `spec.subdomain`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub subdomain: Option<String>,
    /// UID of the VMI, if a cluster assigned one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub uid: Option<String>,
    /// SMBIOS system UUID.
    pub uuid: Uuid,
    /// SMBIOS system serial number.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub serial: Option<String>,
    /// vCPU topology.
    pub topology: Topology,
    /// Guest memory.
    pub memory: Memory,
    /// Disks in the order of the manifest.
    pub disks: Vec<DiskPlan>,
    /// Size in bytes of the image that a claim with a filesystem gets if it has none, by volume.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub new_image_bytes: BTreeMap<String, u64>,
    /// Settings of the SCSI controller; none if `disableHotplug` is set and no disk needs it. The VMM makes the
    /// controller in any case; without settings no disk can be plugged.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scsi: Option<ScsiController>,
    /// Network interfaces in the manifest's order.
    pub nics: Vec<NicPlan>,
    /// Kernel to boot.
    pub boot: BootPlan,
    /// Give the guest a virtio entropy device.
    pub rng: bool,
    /// Give the guest a virtio memory balloon.
    pub balloon: bool,
    /// Give the guest a watchdog (i6300esb) with this action.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub watchdog: Option<WatchdogAction>,
    /// The guest's CID on the host's AF_VSOCK, from 3 to 2^32 - 2, by vhost-vsock. None: a vsock device of the VM's own.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub vhost_vsock_cid: Option<u32>,
    /// Serve metrics of host and VM on a port of the guest.
    #[serde(default)]
    pub downward_metrics: bool,
    /// Give the guest a serial port (ttyS0).
    pub serial_console: bool,
    /// The guest supports ACPI (power button).
    pub acpi: bool,
    /// Offset of the guest's real-time clock from UTC in seconds.
    pub rtc_offset_seconds: i64,
    /// Time between the ACPI power button and the kill on shutdown, in seconds; 0 kills at once.
    pub grace_period_seconds: u64,
    /// Start paused.
    pub start_paused: bool,
    /// Access credentials.
    #[serde(skip_serializing_if = "CredentialsPlan::is_empty", default)]
    pub credentials: CredentialsPlan,
    /// Warnings about ignored or differently implemented fields.
    #[serde(rename = "notes")]
    pub warnings: Vec<Warning>,
}

/// The action when the watchdog of the guest runs out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WatchdogAction {
    /// The machine is reset.
    Reset,
    /// The VM ends at once.
    Poweroff,
    /// The power button is pressed.
    Shutdown,
    /// The VM is paused.
    Pause,
}

impl WatchdogAction {
    /// The action of that name. KubeVirt's default is to reset.
    pub(crate) fn named(name: &str) -> Option<Self> {
        match name {
            "" | "reset" => Some(Self::Reset),
            "poweroff" => Some(Self::Poweroff),
            "shutdown" => Some(Self::Shutdown),
            "pause" => Some(Self::Pause),
            _ => None,
        }
    }
}

/// vCPU topology; every count is at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Number of sockets.
    pub sockets: u32,
    /// Cores per socket.
    pub cores: u32,
    /// Threads per core.
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

/// Kernel to boot.
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
        /// The part of it that the caller appended to the arguments of the manifest.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        append: Option<String>,
    },
    /// The kernel that the first bootable disk carries.
    #[serde(rename_all = "camelCase")]
    Disks {
        /// Names of the disks to try, in order; empty if the VM has none.
        order: Vec<String>,
        /// Arguments to append to the command line found on the disk.
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
    /// A file of `kernelBoot.container`. The directory holds a container image, so the path must be resolved strictly
    /// beneath it, without following symbolic links out of it.
    Beneath(FileRef),
}

/// A file named by the manifest in a directory given by the caller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRef {
    /// The directory.
    pub dir: PathBuf,
    /// The file, relative to it; holds no `.`, `..` or empty component.
    pub path: PathBuf,
}
