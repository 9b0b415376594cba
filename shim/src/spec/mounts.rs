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
/// Mount in which hotplugged volumes appear.
const HOTPLUG: &str = "run/kubevirt/hotplug-disks";

/// Directory of claims, for errors.
pub(super) const CLAIMS: &str = "/var/run/kubevirt-private/vmi-disks";

/// A mount with a meaning for the VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    pub(super) is: Is,
    /// Path on the host.
    pub(super) source: PathBuf,
    pub(super) read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Is {
    Volume(String),
    ServiceAccount,
    Ephemeral,
    Hotplug,
}

/// Returns the mounts of a container that have a meaning for the VM.
pub(super) fn mounts(spec: &Spec) -> Vec<Mount> {
    let mounts = spec.mounts().iter().flatten();
    let known = mounts.filter_map(|mount| {
        let is = what(mount.destination())?;
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
            is,
            source: mount.source().clone().filter(|source| source.is_absolute())?,
            read_only,
        })
    });
    known.collect()
}

fn what(destination: &Path) -> Option<Is> {
    let destination = destination.strip_prefix("/").ok()?;
    // /var/run is a link to /run.
    let destination = destination.strip_prefix("var").unwrap_or(destination);
    for (path, is) in [
        (SERVICE_ACCOUNT, Is::ServiceAccount),
        (EPHEMERAL, Is::Ephemeral),
        (HOTPLUG, Is::Hotplug),
    ] {
        if destination == Path::new(path) {
            return Some(is);
        }
    }
    let (parent, name) = (destination.parent()?, destination.file_name()?);
    let known = VOLUMES.iter().any(|path| parent == Path::new(path));
    known.then(|| Some(Is::Volume(name.to_str()?.to_owned())))?
}
