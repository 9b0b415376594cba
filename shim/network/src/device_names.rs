//! Names of a pod's network devices, as in KubeVirt.

use sha2::{Digest, Sha256};

use super::error::NetworkFault;

/// Name of the pod's first NIC.
pub const PRIMARY_NIC: &str = "eth0";

/// Longest device name, in bytes.
const NAME_MAX: usize = 15;

/// Name of a secondary network's NIC: `pod` and the first digits of the hash of the network's name in the manifest.
pub fn secondary_nic(network: &str) -> String {
    let digest = Sha256::digest(network.as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("pod{}", &hex[..11])
}

/// Names of the devices of one interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNames {
    /// The NIC that the CNI plugin made, and later the placeholder that holds its addresses.
    pub nic: String,
    /// The plugin's NIC after it was renamed.
    pub moved_nic: String,
    pub bridge: String,
    pub tap: String,
}

impl DeviceNames {
    /// Names for a NIC. `eth0`: `eth0-nic`, `k6t-eth0`, `tap0`. `pod123`: `123-nic`, `k6t-123`, `tap123`.
    ///
    /// # Errors
    /// A name is too long, or has characters that no path under /proc/sys may have.
    pub fn for_nic(nic: &str) -> Result<DeviceNames, NetworkFault> {
        let short = match nic.strip_prefix("pod") {
            Some(rest) if !rest.is_empty() => rest,
            _ => nic,
        };
        let number = short
            .strip_prefix("eth")
            .or_else(|| short.strip_prefix("net"))
            .filter(|rest| !rest.is_empty())
            .unwrap_or(short);
        let devices = DeviceNames {
            nic: nic.to_owned(),
            moved_nic: format!("{short}-nic"),
            bridge: format!("k6t-{short}"),
            tap: format!("tap{number}"),
        };
        let fits = |name: &&String| name.len() <= NAME_MAX && is_device_name(name);
        match devices.all().iter().all(fits) && devices.tap != nic {
            true => Ok(devices),
            false => Err(NetworkFault::InvalidField {
                field: "nic",
                reason: format!("{nic:?} is no name of a pod's device, or too long for one"),
            }),
        }
    }

    pub fn contains(&self, name: &str) -> bool {
        self.all().into_iter().any(|own| own == name)
    }

    fn all(&self) -> [&String; 4] {
        [&self.nic, &self.moved_nic, &self.bridge, &self.tap]
    }
}

/// Names become parts of paths under /proc/sys, and the kernel replaces `%d` in a tap's name by a number.
fn is_device_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !name.is_empty() && name != "." && name != ".." && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_in_kubevirt() {
        let devices = DeviceNames::for_nic("eth0").unwrap();
        let names = devices.all().map(String::as_str);
        assert_eq!(names, ["eth0", "eth0-nic", "k6t-eth0", "tap0"]);
        let nic = secondary_nic("red");
        assert_eq!(nic, "podb1f51a511f1");
        let devices = DeviceNames::for_nic(&nic).unwrap();
        assert_eq!(devices.bridge, "k6t-b1f51a511f1");
        assert_eq!(devices.tap, "tapb1f51a511f1");
        assert_eq!(devices.moved_nic, "b1f51a511f1-nic");
        assert_eq!(DeviceNames::for_nic("net1").unwrap().tap, "tap1");
    }

    #[test]
    fn invalid_device_names_are_refused() {
        for bad in ["", "a-name-far-too-long", "../etc", "eth%d", "a b"] {
            assert!(DeviceNames::for_nic(bad).is_err(), "{bad}");
        }
    }
}
