//! The meaning of the mounts of a VM's container, by their paths in KubeVirt's pods.

use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;

/// Directories in which mounts have the names of volumes.
const VOLUMES: [&str; 4] = [
    "run/kubevirt-private/vmi-disks",
    "run/kubevirt-private/config-map",
    "run/kubevirt-private/secret",
    "run/kubevirt-private/downwardapi",
];
/// Mount of the pod's service account.
const SERVICE_ACCOUNT: &str = "run/secrets/kubernetes.io/serviceaccount";
/// Mount for ephemeral data.
const EPHEMERAL: &str = "run/kubevirt-ephemeral-disks";
/// Directory with a mount for each containerDisk that is an image volume.
const IMAGE_VOLUMES: &str = "run/kubevirt-image-volume";
/// Prefix of the names of these mounts. The rest is the index of the volume in the VMI.
const IMAGE_VOLUME_PREFIX: &str = "disk_";
/// Mount of the image volume with the files of kernelBoot.
const KERNEL_BOOT: &str = "run/kubevirt-kernel-boot";
/// Directory with a directory for each Secret of cloud-init, with a mount for each key.
const SECRETS: &str = "run/kubevirt-private/secret";
/// Mount in which hotplugged volumes appear.
const HOTPLUG: &str = "run/kubevirt/hotplug-disks";

/// Directory of claims, for errors.
pub(super) const CLAIMS: &str = "/var/run/kubevirt-private/vmi-disks";

/// A mount with a meaning for the VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    pub(super) kind: MountKind,
    /// Path on the host.
    pub(super) source: PathBuf,
    pub(super) read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MountKind {
    Volume(String),
    /// An image volume with the containerDisk of the VMI's volume at this index.
    ImageVolume(usize),
    /// An image volume with the files of kernelBoot.
    KernelBoot,
    /// The value of a key of a volume's Secret.
    SecretKey {
        volume: String,
        key: String,
    },
    ServiceAccount,
    Ephemeral,
    Hotplug,
}

/// Returns the mounts of a container that have a meaning for the VM.
pub(super) fn mounts(spec: &Spec) -> Vec<Mount> {
    let mounts = spec.mounts().iter().flatten();
    let known = mounts.filter_map(|mount| {
        let kind = mount_kind(mount.destination())?;
        let options = mount.options().iter().flatten();
        let mut read_only = false;
        for option in options {
            match option.as_str() {
                "ro" | "rro" => read_only = true,
                "rw" => read_only = false,
                _ => {}
            }
        }
        Some(Mount {
            kind,
            source: mount.source().clone().filter(|source| source.is_absolute())?,
            read_only,
        })
    });
    known.collect()
}

fn mount_kind(destination: &Path) -> Option<MountKind> {
    let destination = destination.strip_prefix("/").ok()?;
    // /var/run is a link to /run.
    let destination = destination.strip_prefix("var").unwrap_or(destination);
    for (path, kind) in [
        (SERVICE_ACCOUNT, MountKind::ServiceAccount),
        (EPHEMERAL, MountKind::Ephemeral),
        (HOTPLUG, MountKind::Hotplug),
        (KERNEL_BOOT, MountKind::KernelBoot),
    ] {
        if destination == Path::new(path) {
            return Some(kind);
        }
    }
    let (parent, name) = (destination.parent()?, destination.file_name()?.to_str()?);
    if parent == Path::new(IMAGE_VOLUMES) {
        let index = name.strip_prefix(IMAGE_VOLUME_PREFIX)?;
        return index.parse().ok().map(MountKind::ImageVolume);
    }
    if parent.parent() == Some(Path::new(SECRETS)) {
        return Some(MountKind::SecretKey {
            volume: parent.file_name()?.to_str()?.to_owned(),
            key: name.to_owned(),
        });
    }
    let known = VOLUMES.iter().any(|path| parent == Path::new(path));
    known.then(|| MountKind::Volume(name.to_owned()))
}
