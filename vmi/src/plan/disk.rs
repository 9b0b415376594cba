//! One disk of a plan: where the guest finds it, what it is, where its data lies.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One disk of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskPlan {
    /// The disk's name and, unless its source is [`DiskSource::Empty`], the volume's.
    pub name: String,
    /// The identifier KubeVirt gives it: `vda`, `vdb`, … on virtio-blk, `sda`, `sdb`, … on SCSI (CD-ROMs included),
    /// each counted in the manifest's order. The guest names its disks itself.
    pub target: String,
    /// Where the guest finds it.
    pub controller: Controller,
    /// What the guest finds.
    pub device: DeviceType,
    /// The guest cannot write it.
    pub read_only: bool,
    /// What the guest writes goes to an overlay that ends with the VM; the source is only read.
    pub overlay: bool,
    /// Whether the image's own header may say what format it has.
    pub format: FormatPolicy,
    /// Serial number shown to the guest, at most 256 of `[A-Za-z0-9_.+-]`; virtio-blk carries the first 20 bytes.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub serial: Option<String>,
    /// How the host caches it.
    pub cache: CacheMode,
    /// Another VM may have it open too.
    pub shareable: bool,
    /// The block sizes the guest is told.
    #[serde(default)]
    pub block_size: BlockSize,
    /// What happens on an I/O error of the host.
    #[serde(default)]
    pub error_policy: ErrorPolicy,
    /// Request queues, 1 or one for each vCPU. Of a SCSI disk these are the controller's.
    pub queues: u32,
    /// The I/O thread that serves it, counted from 1 in each VM, as `ioThreadsPolicy` and `dedicatedIOThread` share
    /// them out; none if the manifest leaves that to the VMM.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub io_thread: Option<u32>,
    /// Boot order, from 1.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub boot_order: Option<u32>,
    /// What the manifest calls the object or image behind it: `persistentVolumeClaim/data`. None where it has no name.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub origin: Option<String>,
    /// Where its data is.
    pub source: DiskSource,
}

impl DiskPlan {
    /// Whether it is a logical unit of the SCSI controller.
    #[must_use]
    pub fn is_scsi(&self) -> bool {
        self.scsi_address().is_some()
    }

    /// Where it is on the SCSI controller, if it is on that.
    #[must_use]
    pub fn scsi_address(&self) -> Option<ScsiAddress> {
        match self.controller {
            Controller::VirtioBlk => None,
            Controller::VirtioScsi(address) => Some(address),
        }
    }
}

/// Where the guest finds a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Controller {
    /// A virtio-blk function of its own.
    VirtioBlk,
    /// A logical unit of the VM's one virtio-scsi controller.
    VirtioScsi(ScsiAddress),
}

/// A logical unit of the virtio-scsi controller, which is host 0 and channel 0: `0:0:TARGET:LUN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ScsiAddress {
    /// Target, 0 to 255. Every disk of a manifest is on target 0, as KubeVirt has it.
    pub target: u8,
    /// Logical unit number, 0 to 16383: that of the letter in the disk's name, `sda` is 0.
    pub lun: u16,
}

impl ScsiAddress {
    /// LUNs of a target.
    pub const LUNS: u16 = 16_384;

    /// The address a disk gets beside those in use: the lowest free LUN of target 0. None if all are taken.
    ///
    /// Disks of a manifest take theirs in its order; one that is plugged later goes through the same door, so an
    /// address never changes while its disk is there.
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

/// What a disk is for the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DeviceType {
    /// A disk.
    Disk,
    /// A CD-ROM drive, always read-only and on SCSI.
    #[serde(rename_all = "camelCase")]
    Cdrom {
        /// The tray stands open at the start.
        tray_open: bool,
    },
    /// A SCSI device of the host, which the guest's commands are passed on to; its source is a block device.
    #[serde(rename_all = "camelCase")]
    Lun {
        /// Persistent reservations too.
        reservation: bool,
    },
}

/// Whether a header that a guest may have written is believed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FormatPolicy {
    /// Raw, whatever it looks like.
    #[default]
    Raw,
    /// Raw or qcow2, as its first bytes say: an image that no guest has written.
    Probe,
}

/// `disks[].cache`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheMode {
    /// Not given: past the host's page cache if the file can do that, else write-through.
    #[default]
    Auto,
    /// Past the host's page cache; an error if the file cannot do that.
    None,
    /// Through the host's page cache, each write durable.
    WriteThrough,
    /// Through the host's page cache, durable at the guest's flush.
    WriteBack,
}

/// `disks[].blockSize`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BlockSize {
    /// Not given: logical blocks of 512 bytes.
    #[default]
    Default,
    /// As the manifest says, in bytes; both are powers of two from 512 to 2 MiB, `logical` is not the larger one.
    #[serde(rename_all = "camelCase")]
    Custom {
        /// Unit the guest addresses.
        logical: u32,
        /// Unit that is written without reading first.
        physical: u32,
        /// Unit of a discard; not given or 0: the VMM's choice.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        discard_granularity: Option<u32>,
    },
    /// The block device's own sizes, or the file system's block size for a file.
    MatchVolume,
}

/// `disks[].errorPolicy`: what happens when the host fails to read or write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrorPolicy {
    /// The VM is paused; resuming it tries again. KubeVirt's default.
    #[default]
    Stop,
    /// The guest is told.
    Report,
    /// Nobody is told: the request counts as done.
    Ignore,
    /// The VM is paused if there is no space left, else the guest is told.
    Enospace,
}

/// The virtio-scsi controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScsiController {
    /// Request queues, 1 or one for each vCPU.
    pub queues: u32,
}

/// What tells an open file from all others while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// The file system's number, or that of the block device the file is.
    pub device: u64,
    /// Its number there; 0 for a block device.
    pub inode: u64,
}

/// Where a disk's data is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DiskSource {
    /// A CD-ROM drive without a medium.
    Empty,
    /// A persistentVolumeClaim, also that of an ephemeral volume, or a dataVolume: a raw image file, a directory with
    /// a raw `disk.img`, or a block device.
    File(PathBuf),
    /// An open file that somebody handed over; nobody knows it by a name.
    Descriptor(FileId),
    /// A containerDisk: an image file, a directory of the container image's root or of its `disk/`, an OCI layout, or
    /// an archive of the image.
    ContainerDisk {
        /// What the caller mapped the volume to.
        path: PathBuf,
        /// `containerDisk.path`: the image file inside the container image, relative to its root, without `.` or `..`.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        image_path: Option<PathBuf>,
    },
    /// A scratch disk that lives as long as the VM.
    #[serde(rename_all = "camelCase")]
    EmptyDisk {
        /// Size in bytes, a multiple of 1 MiB and at least that.
        capacity_bytes: u64,
    },
    /// A raw image on the node.
    #[serde(rename_all = "camelCase")]
    HostDisk {
        /// Absolute path as the manifest has it.
        path: PathBuf,
        /// Create it, sparse, with this size in bytes if it is not there.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        create_bytes: Option<u64>,
    },
    /// A read-only seed for cloud-init.
    #[serde(rename_all = "camelCase")]
    CloudInit {
        /// How it is laid out.
        layout: SeedLayout,
        /// The instance's description, JSON.
        meta_data: String,
        /// Always a file, maybe an empty one.
        user_data: SeedData,
        /// No file if there is none.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        network_data: Option<SeedData>,
    },
    /// A read-only disk with the files of a configMap, secret, downwardAPI or serviceAccount volume.
    Files {
        /// One file for each key, as the kubelet mounts them; none for an optional object that is not there.
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
    /// What the manifest holds.
    Inline(#[serde(with = "super::bytes_as_text")] Vec<u8>),
    /// A Secret's files: the data is in the key `userdata` or `userData`, or `networkdata` or `networkData`.
    Secret(PathBuf),
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
    fn a_gap_is_filled_and_nobody_moves() {
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
