//! One disk of a plan: its address, type and data source.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One disk of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskPlan {
    /// Name of the disk and, unless the source is [`DiskSource::Empty`], of the volume.
    pub name: String,
    /// The identifier KubeVirt gives it: `vda`, `vdb`, … on virtio-blk, `sda`, `sdb`, … on SCSI (CD-ROMs included),
    /// each counted in the manifest's order. The guest names its disks itself.
    pub target: String,
    /// Controller and address.
    pub controller: Controller,
    /// Device type.
    pub device: DeviceType,
    /// Read-only for the guest.
    pub read_only: bool,
    /// Guest writes go to an overlay that is removed with the VM; the source is only read.
    pub overlay: bool,
    /// Policy for detecting the image format.
    pub format: FormatPolicy,
    /// Serial number shown to the guest, at most 256 of `[A-Za-z0-9_.+-]`; virtio-blk carries the first 20 bytes.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub serial: Option<String>,
    /// Caching on the host.
    pub cache: CacheMode,
    /// Other VMs may have the image open too.
    pub shareable: bool,
    /// Block sizes shown to the guest.
    #[serde(default)]
    pub block_size: BlockSize,
    /// Reaction to an I/O error on the host.
    #[serde(default)]
    pub error_policy: ErrorPolicy,
    /// The claim is preallocated, so the guest is offered no discards.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub preallocated: bool,
    /// Number of request queues: 1 or one per vCPU; for a SCSI disk, those of the controller.
    pub queues: u32,
    /// Number of its I/O thread, from 1 in each VM, assigned by `ioThreadsPolicy` and `dedicatedIOThread`; none if the
    /// manifest has neither.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub io_thread: Option<u32>,
    /// Boot order, from 1.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub boot_order: Option<u32>,
    /// `KIND/NAME` of the object or image behind it, such as `persistentVolumeClaim/data`; none if it has no name.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub origin: Option<String>,
    /// Source of its data.
    pub source: DiskSource,
}

impl DiskPlan {
    /// True if it is a logical unit of the SCSI controller.
    #[must_use]
    pub fn is_scsi(&self) -> bool {
        self.scsi_address().is_some()
    }

    /// True if it is a CD-ROM drive without a disc.
    #[must_use]
    pub fn is_empty_drive(&self) -> bool {
        self.source == DiskSource::Empty
    }

    /// Takes the disc out of a drive.
    pub fn eject(&mut self) {
        self.source = DiskSource::Empty;
        self.origin = None;
    }

    /// Address on the SCSI controller; none for virtio-blk.
    #[must_use]
    pub fn scsi_address(&self) -> Option<ScsiAddress> {
        match self.controller {
            Controller::VirtioBlk | Controller::VirtioScsiUnassigned => None,
            Controller::VirtioScsi(address) => Some(address),
        }
    }

    /// Puts a disk that was plugged at the address that the VMM gave it.
    pub fn assign(&mut self, address: ScsiAddress) {
        self.controller = Controller::VirtioScsi(address);
        self.target = address.name();
    }
}

/// Controller of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Controller {
    /// A separate virtio-blk device.
    VirtioBlk,
    /// A logical unit of the VM's one virtio-scsi controller.
    VirtioScsi(ScsiAddress),
    /// The same, of a disk that is being plugged: the VMM chooses its address.
    VirtioScsiUnassigned,
}

/// A logical unit of the virtio-scsi controller, which is host 0 and channel 0: `0:0:TARGET:LUN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ScsiAddress {
    /// Target, 0 to 255. All disks of a manifest are on target 0, as with KubeVirt.
    pub target: u8,
    /// Logical unit number, 0 to 16383. It is the index of KubeVirt's disk name: `sda` is 0.
    pub lun: u16,
}

impl ScsiAddress {
    /// Number of LUNs of a target.
    pub const LUNS: u16 = 16_384;

    /// Lowest free LUN of target 0; none if all are in use.
    ///
    /// For the manifest's disks: the VMM chooses the LUN of a hot-plugged disk.
    #[must_use]
    pub fn free(used: impl IntoIterator<Item = ScsiAddress>) -> Option<ScsiAddress> {
        let used: std::collections::HashSet<ScsiAddress> = used.into_iter().collect();
        (0..Self::LUNS)
            .map(|lun| ScsiAddress { target: 0, lun })
            .find(|address| !used.contains(address))
    }

    /// KubeVirt's identifier of the disk on target 0 with this LUN: `sda`, `sdb`, …
    #[must_use]
    pub fn name(self) -> String {
        target_name("sd", self.lun.into())
    }
}

/// `vda`, `vdb`, … `vdz`, `vdaa`, …
pub(super) fn target_name(prefix: &str, index: usize) -> String {
    let mut letters = Vec::new();
    let mut rest = index + 1;
    while rest > 0 {
        rest -= 1;
        letters.push(char::from(b'a' + (rest % 26) as u8));
        rest /= 26;
    }
    prefix.chars().chain(letters.into_iter().rev()).collect()
}

/// Type of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DeviceType {
    /// A disk.
    Disk,
    /// A CD-ROM drive, always read-only and on SCSI.
    #[serde(rename_all = "camelCase")]
    Cdrom {
        /// The tray is open at the start.
        tray_open: bool,
    },
    /// SCSI passthrough: commands of the guest go to a SCSI device of the host. The source is a block device.
    #[serde(rename_all = "camelCase")]
    Lun {
        /// Pass persistent reservations through too.
        reservation: bool,
    },
}

/// Policy for detecting the format of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FormatPolicy {
    /// Always raw, since a guest may have written the header.
    #[default]
    Raw,
    /// Detect raw or qcow2 by the header; only for images no guest can write.
    Probe,
}

/// `disks[].cache`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Not given: O_DIRECT if the file supports it, else write-through.
    #[default]
    Auto,
    /// O_DIRECT; an error if the file does not support it.
    None,
    /// Through the host's page cache; each write is durable.
    WriteThrough,
    /// Through the host's page cache; durable after a flush by the guest.
    WriteBack,
}

/// `disks[].blockSize`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BlockSize {
    /// Not given: logical blocks of 512 bytes.
    #[default]
    Default,
    /// Given in bytes; both are powers of two, and `logical` ≤ `physical`. `logical` is 512 to 4096.
    #[serde(rename_all = "camelCase")]
    Custom {
        /// Logical block size.
        logical: u32,
        /// Physical block size.
        physical: u32,
        /// Granularity of discards; none or 0 lets the VMM choose.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        discard_granularity: Option<u32>,
    },
    /// The block device's own sizes, or the file system's block size for a file.
    MatchVolume,
}

/// `disks[].errorPolicy`: reaction to an I/O error on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrorPolicy {
    /// Pause the VM; the request is repeated on resume. KubeVirt's default.
    #[default]
    Stop,
    /// Report the error to the guest.
    Report,
    /// Complete the request without an error.
    Ignore,
    /// Pause the VM on ENOSPC, else report the error to the guest.
    Enospace,
}

/// The virtio-scsi controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScsiController {
    /// Number of request queues asked of the VMM: 1 or one per vCPU. Its controller has at most 8.
    pub queues: u32,
}

/// Identity of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// Device number of the file system, or of the block device itself.
    pub device: u64,
    /// Inode number; 0 for a block device.
    pub inode: u64,
}

/// Source of a disk's data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DiskSource {
    /// A CD-ROM drive without a medium.
    Empty,
    /// A persistentVolumeClaim, also that of an ephemeral volume, or a dataVolume: a raw image file, a directory with
    /// a raw `disk.img`, or a block device.
    File(PathBuf),
    /// An open file passed as a descriptor; its path is unknown.
    Descriptor(FileId),
    /// A containerDisk: an image file, a directory of the container image's root or of its `disk/`, an OCI layout, or
    /// an archive of the image.
    ContainerDisk {
        /// Path the caller gave for the volume.
        path: PathBuf,
        /// `containerDisk.path`: the image file inside the container image, relative to its root, without `.` or `..`.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        image_path: Option<PathBuf>,
    },
    /// A scratch disk that is removed with the VM.
    #[serde(rename_all = "camelCase")]
    EmptyDisk {
        /// Size in bytes, a multiple of 1 MiB and at least that.
        capacity_bytes: u64,
    },
    /// A raw image on the node.
    #[serde(rename_all = "camelCase")]
    HostDisk {
        /// Absolute path on the node.
        path: PathBuf,
        /// If the file does not exist, create it as a sparse file of this size in bytes. None: it must exist.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        create_bytes: Option<u64>,
    },
    /// A read-only seed for cloud-init.
    #[serde(rename_all = "camelCase")]
    CloudInit {
        /// Layout of the seed.
        layout: SeedLayout,
        /// Metadata of the instance, JSON.
        meta_data: String,
        /// Directories of Secrets, each with a file for each key: public keys to add to the metadata.
        #[serde(skip_serializing_if = "Vec::is_empty", default)]
        public_keys: Vec<PathBuf>,
        /// User data; the file always exists, but may be empty.
        user_data: SeedData,
        /// Network configuration; without it there is no such file.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        network_data: Option<SeedData>,
    },
    /// A read-only disk with metrics of host and VM, which the monitor keeps up to date.
    DownwardMetrics,
    /// A read-only disk with the files of a configMap, secret, downwardAPI or serviceAccount volume.
    Files {
        /// Directory with one file per key, as the kubelet mounts it; none for a missing optional object.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        dir: Option<PathBuf>,
        /// The volume's label, 1 to 32 ASCII characters.
        label: String,
    },
}

/// Names and label of the files that cloud-init looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SeedLayout {
    /// cloud-init's NoCloud, labelled `cidata`.
    NoCloud,
    /// OpenStack's config drive, labelled `config-2`.
    ConfigDrive,
}

/// One file for cloud-init.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SeedData {
    /// Data in the manifest.
    Inline(#[serde(with = "super::bytes_as_text")] Vec<u8>),
    /// Directory of a Secret; its key is `userdata` or `userData`, or `networkdata` or `networkData`.
    Secret(PathBuf),
    /// Files that may hold the value of one of these keys: the first regular file does. The kubelet mounts a directory
    /// in the place of a key that the Secret does not have.
    SecretFiles(Vec<PathBuf>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_count_in_letters() {
        let names: Vec<String> = [0, 1, 25, 26, 51, 52, 701, 702]
            .map(|index| target_name("vd", index))
            .into();
        assert_eq!(
            names,
            ["vda", "vdb", "vdz", "vdaa", "vdaz", "vdba", "vdzz", "vdaaa"]
        );
        assert_eq!(ScsiAddress { target: 0, lun: 27 }.name(), "sdab");
    }

    #[test]
    fn the_lowest_free_lun_is_used() {
        let at = |lun| ScsiAddress { target: 0, lun };
        assert_eq!(ScsiAddress::free([]), Some(at(0)));
        assert_eq!(ScsiAddress::free([at(0), at(2)]), Some(at(1)));
        assert_eq!(
            ScsiAddress::free([ScsiAddress { target: 1, lun: 0 }]),
            Some(at(0))
        );
        assert_eq!(ScsiAddress::free((0..ScsiAddress::LUNS).map(at)), None);
    }
}
