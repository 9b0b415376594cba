//! The compared configurations, and how each is started.

use super::wire;
use crate::bench_files::BenchFiles;
use crate::cases::{BenchCase, named_cases};
use crate::guest::{Guest, SCRIPT, Vmm};
use crate::peers::Devices;
use anyhow::Result;
use std::path::Path;
use std::process::{Command, Stdio};

named_cases! {
    /// A VMM with its NIC in one configuration.
    pub enum Case {
        /// Husk without vhost: frames pass through the VMM.
        Husk = "husk",
        /// Husk with vhost: the kernel forwards the frames.
        HuskVhost = "husk-vhost",
        /// QEMU's virtio-net, served by its main loop.
        Q35 = "qemu-q35",
        /// The same with vhost.
        Q35Vhost = "qemu-q35-vhost",
        /// Firecracker.
        Firecracker = "firecracker",
        /// Cloud Hypervisor.
        CloudHypervisor = "cloud-hypervisor",
        /// `husk-floor`: the least that moves frames in user space.
        Floor = "floor",
    }
}

/// Number of processors of every guest.
pub const VCPUS: u32 = 1;

/// Memory of every guest.
pub const MEMORY_MIB: u64 = 256;

/// The datapath in the kernel.
const VHOST: &str = "/dev/vhost-net";

/// Runs its arguments where the vhost device cannot be opened.
const WITHOUT_VHOST: &str = "\
if [ -e /dev/vhost-net ]; then
    mount --bind /dev/vhost-net /dev/vhost-net
    mount -o remount,bind,nodev /dev/vhost-net
fi
exec \"$@\"";

const GUEST: Guest<'_> = Guest {
    name: "bench-net",
    vcpus: VCPUS,
    mib: MEMORY_MIB,
    append: Some(SCRIPT),
};

impl Case {
    /// True if the kernel forwards the frames (vhost-net).
    pub fn vhost(self) -> bool {
        matches!(self, Self::HuskVhost | Self::Q35Vhost)
    }

    /// True if the VMM creates bridge and tap by itself.
    pub fn makes_bridge(self) -> bool {
        matches!(self, Self::Husk | Self::HuskVhost)
    }

    /// Reason why the case cannot be measured on this machine.
    pub fn absent(self) -> Option<String> {
        (self.vhost() && !Path::new(VHOST).exists()).then(|| format!("there is no {VHOST}"))
    }

    /// The VMM of the case.
    pub fn ready(self, files: &BenchFiles) -> Result<Vmm> {
        if let Some(peer) = self.peer() {
            let devices = Devices {
                tap: Some(wire::TAP),
                ..Devices::default()
            };
            let mut vmm = peer.ready(&GUEST, files, &devices)?;
            vmm.command = under(wire::within(&wire::pod()), &vmm.command);
            return Ok(vmm);
        }
        if self.makes_bridge() {
            return self.husk(files);
        }
        let mut vmm = match self {
            Self::Floor => GUEST.floor(files, Some(wire::TAP)),
            _ => self.qemu(files),
        };
        vmm.command = under(wire::within(&wire::pod()), &vmm.command);
        Ok(vmm)
    }

    fn husk(self, files: &BenchFiles) -> Result<Vmm> {
        let mut vmm = GUEST.husk(
            files,
            "interfaces: [{name: default, bridge: {}}]",
            "networks: [{name: default, pod: {}}]",
        )?;
        vmm.command.args(["--netns", &wire::pod()]);
        if self == Self::Husk {
            let mut without = Command::new("unshare");
            without.args(["--mount", "sh", "-ec", WITHOUT_VHOST, "sh"]);
            vmm.command = under(without, &vmm.command);
        }
        Ok(vmm)
    }

    fn qemu(self, files: &BenchFiles) -> Vmm {
        let mut vmm = GUEST.qemu("q35", files);
        let vhost = if self.vhost() { "on" } else { "off" };
        let tap = format!(
            "tap,id=net,ifname={},script=no,downscript=no,vhost={vhost}",
            wire::TAP
        );
        vmm.command
            .args(["-netdev", &tap])
            .args(["-device", "virtio-net-pci,netdev=net,romfile="]);
        vmm
    }
}

/// `command`, run by `other`, which takes a command as its last arguments.
fn under(mut other: Command, command: &Command) -> Command {
    other.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => other.env(name, value),
            None => other.env_remove(name),
        };
    }
    other.stdin(Stdio::null());
    other
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(case: Case) -> String {
        let folder = tempfile::tempdir().expect("a folder");
        let files = BenchFiles::example(folder.path());
        format!("{:?}", case.ready(&files).expect("a command").command)
    }

    #[test]
    fn husks_cases_differ_as_their_names_say() {
        let [husk, husk_vhost, q35, q35_vhost, floor] = [
            Case::Husk,
            Case::HuskVhost,
            Case::Q35,
            Case::Q35Vhost,
            Case::Floor,
        ]
        .map(words);
        assert!(
            floor.contains("husk-bench-pod") && floor.contains("husk-floor\"") && floor.contains("\"tap0\"")
        );
        assert!(husk.contains("nodev") && !husk_vhost.contains("nodev"));
        for words in [husk, husk_vhost] {
            assert!(
                words.contains("\"--netns\" \"/run/netns/husk-bench-pod\""),
                "{words}"
            );
            assert!(words.contains("HUSK_RUNTIME_DIR"), "{words}");
        }
        assert!(q35.contains("vhost=off") && q35_vhost.contains("vhost=on"));
        for words in [q35, q35_vhost] {
            assert!(words.contains(
                "\"--net=/run/netns/husk-bench-pod\" \"--\" \"setsid\" \"--\" \"qemu-system-x86_64\""
            ));
        }
    }
}
