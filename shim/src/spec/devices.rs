//! Block devices of a container. The spec has their numbers; their paths on the host are in sysfs.

use std::fs;
use std::path::{Path, PathBuf};

use oci_spec::runtime::{LinuxDevice, LinuxDeviceType, Spec};

use super::error::SpecError;

/// A block device of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Device {
    /// Name in the container's /dev.
    pub(super) name: String,
    /// Path on the host.
    pub(super) path: PathBuf,
    /// Device number, as in `st_rdev`.
    pub(super) number: u64,
}

/// Returns the block devices of a container, by their names in its /dev.
pub(super) fn devices(spec: &Spec) -> Result<Vec<Device>, SpecError> {
    let devices = spec.linux().as_ref().and_then(|linux| linux.devices().as_ref());
    let block = devices
        .into_iter()
        .flatten()
        .filter(|device| device.typ() == LinuxDeviceType::B);
    block
        .filter_map(|device| Some((device, name(device)?)))
        .map(|(device, name)| find(device, name).ok_or_else(|| unknown(device)))
        .collect()
}

fn name(device: &LinuxDevice) -> Option<String> {
    let name = device.path().strip_prefix("/dev").ok()?.to_str()?;
    Some(name.to_owned())
}

fn find(device: &LinuxDevice, name: String) -> Option<Device> {
    let (major, minor) = (device.major().try_into().ok()?, device.minor().try_into().ok()?);
    let uevent = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/uevent")).ok()?;
    let node = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    Some(Device {
        name,
        path: Path::new("/dev").join(node),
        number: rustix::fs::makedev(major, minor),
    })
}

fn unknown(device: &LinuxDevice) -> SpecError {
    SpecError::Device {
        path: device.path().display().to_string(),
        major: device.major(),
        minor: device.minor(),
    }
}
