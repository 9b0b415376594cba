//! Block devices of a container. The spec has their numbers; their paths on the host are in sysfs.

use std::fs;
use std::path::{Path, PathBuf};

use oci_spec::runtime::{LinuxDevice, LinuxDeviceCgroup, LinuxDeviceType, Spec};

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
    /// The container may only read it.
    pub(super) read_only: bool,
}

/// Returns the block devices of a container, by their names in its /dev.
pub(super) fn devices(spec: &Spec) -> Result<Vec<Device>, SpecError> {
    let linux = spec.linux().as_ref();
    let devices = linux.and_then(|linux| linux.devices().as_ref());
    let resources = linux.and_then(|linux| linux.resources().as_ref());
    let rules = resources.and_then(|resources| resources.devices().as_deref());
    let block = devices
        .into_iter()
        .flatten()
        .filter(|device| device.typ() == LinuxDeviceType::B);
    block
        .filter_map(|device| Some((device, name(device)?)))
        .map(|(device, name)| find(device, name, rules.unwrap_or_default()).ok_or_else(|| unknown(device)))
        .collect()
}

fn name(device: &LinuxDevice) -> Option<String> {
    let name = device.path().strip_prefix("/dev").ok()?.to_str()?;
    Some(name.to_owned())
}

fn find(device: &LinuxDevice, name: String, rules: &[LinuxDeviceCgroup]) -> Option<Device> {
    let (major, minor) = (device.major().try_into().ok()?, device.minor().try_into().ok()?);
    let uevent = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/uevent")).ok()?;
    let node = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    Some(Device {
        name,
        path: Path::new("/dev").join(node),
        number: rustix::fs::makedev(major, minor),
        read_only: is_read_only(device, rules),
    })
}

/// True if the rules for the device cgroup do not let the container write a block device. The kubelet gives the device
/// of a read-only claim the access `r`. Without a rule about it the device is as writable as its node.
fn is_read_only(device: &LinuxDevice, rules: &[LinuxDeviceCgroup]) -> bool {
    // Negative numbers and missing ones are wildcards.
    let any_or = |number: Option<i64>, wanted| number.is_none_or(|number| number < 0 || number == wanted);
    let access = |rule: &LinuxDeviceCgroup, letters: &[char]| match rule.access() {
        Some(access) if !access.is_empty() => access.contains(letters),
        _ => true,
    };
    let mut matching = rules.iter().filter(|rule| {
        matches!(rule.typ(), None | Some(LinuxDeviceType::A | LinuxDeviceType::B))
            && any_or(rule.major(), device.major())
            && any_or(rule.minor(), device.minor())
            // A rule about nodes alone, `m`, leaves the data alone.
            && access(rule, &['r', 'w'])
    });
    matching
        .next_back()
        .is_some_and(|last| !last.allow() || !access(last, &['w']))
}

fn unknown(device: &LinuxDevice) -> SpecError {
    SpecError::Device {
        path: device.path().display().to_string(),
        major: device.major(),
        minor: device.minor(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_last_rule_about_a_device_decides_whether_it_is_written() {
        let device = json!({"path": "/dev/data", "type": "b", "major": 8, "minor": 16});
        let device: LinuxDevice = serde_json::from_value(device).unwrap();
        let read_only = |rules: &[&Value]| {
            is_read_only(&device, &serde_json::from_value::<Vec<_>>(json!(rules)).unwrap())
        };
        let rule =
            |access: &str| json!({"allow": true, "type": "b", "major": 8, "minor": 16, "access": access});
        let deny_all = json!({"allow": false, "access": "rwm"});
        let other = json!({"allow": true, "type": "b", "major": 8, "minor": 0, "access": "r"});
        let character = json!({"allow": true, "type": "c", "major": 8, "minor": 16, "access": "r"});
        let nodes = json!({"allow": true, "type": "b", "major": -1, "minor": -1, "access": "m"});
        let privileged = json!({"allow": true, "type": "a", "access": "rwm"});
        assert!(read_only(&[&deny_all, &rule("r")]));
        assert!(read_only(&[&deny_all, &rule("rm"), &nodes]));
        assert!(read_only(&[&deny_all]));
        assert!(read_only(&[
            &rule("rw"),
            &json!({"allow": false, "type": "b", "major": 8, "access": "w"})
        ]));
        // The kubelet's of a writable claim, and that of `ctr run --device`.
        for writable in ["mrw", "rwm", "rw"] {
            assert!(!read_only(&[
                &deny_all,
                &rule(writable),
                &nodes,
                &other,
                &character
            ]));
        }
        assert!(!read_only(&[&privileged]) && !read_only(&[]));
        assert!(!read_only(&[&json!({"allow": true})]));
    }
}
