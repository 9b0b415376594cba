//! Firecracker and Cloud Hypervisor, as VMMs of a benchmark's guest.
//!
//! Both are given as programs that the user built. Firecracker has its PCI bus on, so that the guest needs the same
//! drivers for it as for the others.

use super::bench_files::BenchFiles;
use super::guest::{Guest, Vmm, program};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;
use std::path::{Path, PathBuf};
use xtask::checkout;

/// Name of the case of Firecracker.
pub const FIRECRACKER: &str = "firecracker";
/// Name of the case of Cloud Hypervisor.
pub const CLOUD_HYPERVISOR: &str = "cloud-hypervisor";

/// Programs to compare Husk with, besides QEMU.
#[derive(clap::Args, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peers {
    /// Also measure this program of Firecracker, 1.14 or newer
    #[arg(long, value_name = "PATH")]
    pub firecracker: Option<PathBuf>,
    /// Also measure this program of Cloud Hypervisor
    #[arg(long, value_name = "PATH")]
    pub cloud_hypervisor: Option<PathBuf>,
}

/// One of the programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Peer {
    /// Firecracker.
    Firecracker,
    /// Cloud Hypervisor.
    CloudHypervisor,
}

/// Devices of a guest besides its serial line.
#[derive(Debug, Default)]
pub struct Devices<'a> {
    /// Raw image of a disk. Its writes stay in the host's page cache until the guest flushes them.
    pub disk: Option<&'a Path>,
    /// With a disk of Firecracker: io_uring in place of one system call after the other.
    pub io_uring: bool,
    /// Name of a tap.
    pub tap: Option<&'a str>,
}

impl Peers {
    /// The same programs as copies in `target/`, which the lab can read.
    ///
    /// # Errors
    /// Names the program that cannot be copied.
    pub fn staged(&self) -> Result<Self> {
        let folder = checkout::folder(checkout::target().join("bench/peers"))?;
        let copy = |program: &Option<PathBuf>, name: &str| -> Result<Option<PathBuf>> {
            let Some(program) = program else { return Ok(None) };
            let to = folder.join(name);
            // A running copy of another benchmark keeps its file.
            let _ = std::fs::remove_file(&to);
            std::fs::copy(program, &to).with_context(|| format!("cannot copy {}", program.display()))?;
            Ok(Some(to))
        };
        Ok(Self {
            firecracker: copy(&self.firecracker, FIRECRACKER)?,
            cloud_hypervisor: copy(&self.cloud_hypervisor, CLOUD_HYPERVISOR)?,
        })
    }

    /// The programs that are given.
    pub fn programs(&self) -> impl Iterator<Item = PathBuf> {
        let all = [&self.firecracker, &self.cloud_hypervisor];
        all.into_iter().flatten().cloned()
    }

    /// The same programs under other paths.
    pub fn map(&self, to: impl Fn(&Path) -> PathBuf) -> Self {
        Self {
            firecracker: self.firecracker.as_deref().map(&to),
            cloud_hypervisor: self.cloud_hypervisor.as_deref().map(&to),
        }
    }

    /// True if the program of `peer` is given.
    pub fn has(&self, peer: Peer) -> bool {
        self.program(peer).is_some()
    }

    fn program(&self, peer: Peer) -> Option<&Path> {
        match peer {
            Peer::Firecracker => self.firecracker.as_deref(),
            Peer::CloudHypervisor => self.cloud_hypervisor.as_deref(),
        }
    }
}

impl Peer {
    /// Name of its case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Firecracker => FIRECRACKER,
            Self::CloudHypervisor => CLOUD_HYPERVISOR,
        }
    }

    /// The VMM of `guest`, which has an initrd.
    pub fn ready(self, guest: &Guest<'_>, files: &BenchFiles, devices: &Devices<'_>) -> Result<Vmm> {
        let path = files.peers.program(self);
        let mut command = program(path.with_context(|| format!("no program of {self}"))?);
        // Husk adds panic=1 to every command line that lacks it.
        let append = format!("{} panic=1", guest.append.unwrap_or_default());
        match self {
            Self::Firecracker => {
                let config = guest.file(files, "json");
                // It has no ACPI state S5: a guest ends by a reset of the keyboard controller.
                let append = format!("{append} reboot=k");
                std::fs::write(&config, firecracker(guest, files, &append, devices).to_string())
                    .with_context(|| format!("cannot write {}", config.display()))?;
                command.args(["--no-api", "--enable-pci", "--level", "Error", "--config-file"]);
                command.arg(config);
            }
            Self::CloudHypervisor => {
                command.arg("--kernel").arg(&files.kernel);
                command.arg("--initramfs").arg(&files.initrd);
                command.args(["--cmdline", &append]);
                command.args(["--cpus", &format!("boot={}", guest.vcpus)]);
                command.args(["--memory", &format!("size={}M", guest.mib)]);
                command.args(["--serial", "tty", "--console", "off"]);
                if let Some(disk) = devices.disk {
                    let disk = format!(
                        "path={},image_type=raw,num_queues={}",
                        disk.display(),
                        guest.vcpus
                    );
                    command.args(["--disk", &disk]);
                }
                if let Some(tap) = devices.tap {
                    command.args(["--net", &format!("tap={tap}")]);
                }
            }
        }
        Ok(guest.vmm(files, command))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Firecracker's configuration file.
fn firecracker(guest: &Guest<'_>, files: &BenchFiles, append: &str, devices: &Devices<'_>) -> Value {
    let mut config = json!({
        "boot-source": {
            "kernel_image_path": files.kernel,
            "initrd_path": files.initrd,
            "boot_args": append,
        },
        "machine-config": {"vcpu_count": guest.vcpus, "mem_size_mib": guest.mib},
        "drives": [],
    });
    if let Some(disk) = devices.disk {
        config["drives"] = json!([{
            "drive_id": "data",
            "path_on_host": disk,
            "is_root_device": false,
            "is_read_only": false,
            "cache_type": "Writeback",
            "io_engine": if devices.io_uring { "Async" } else { "Sync" },
        }]);
    }
    if let Some(tap) = devices.tap {
        config["network-interfaces"] = json!([{"iface_id": "eth0", "host_dev_name": tap}]);
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(peer: Peer, devices: &Devices<'_>) -> (String, String) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut files = BenchFiles::example(folder.path());
        files.peers = Peers {
            firecracker: Some("/fc".into()),
            cloud_hypervisor: Some("/ch".into()),
        };
        let guest = Guest {
            name: "bench",
            vcpus: 2,
            mib: 256,
            append: Some("console=ttyS0 husk.do=poweroff"),
        };
        let vmm = peer.ready(&guest, &files, devices).expect("a command");
        let config = std::fs::read_to_string(folder.path().join("bench.json"));
        (format!("{:?}", vmm.command), config.unwrap_or_default())
    }

    #[test]
    fn firecracker_has_a_file() {
        let devices = Devices {
            disk: Some(Path::new("/files/data.img")),
            ..Devices::default()
        };
        let (command, config) = words(Peer::Firecracker, &devices);
        assert!(
            command.contains("\"/fc\" \"--no-api\" \"--enable-pci\""),
            "{command}"
        );
        assert!(
            config.contains(r#""io_engine":"Sync""#) && config.contains(r#""vcpu_count":2"#),
            "{config}"
        );
        assert!(
            config.contains("husk.do=poweroff panic=1 reboot=k") && !config.contains("network"),
            "{config}"
        );
    }

    #[test]
    fn cloud_hypervisor_has_options() {
        let devices = Devices {
            tap: Some("tap0"),
            ..Devices::default()
        };
        let (command, _) = words(Peer::CloudHypervisor, &devices);
        assert!(
            command.contains("\"--net\" \"tap=tap0\"") && !command.contains("--disk"),
            "{command}"
        );
    }

    #[test]
    fn a_program_that_is_not_given_is_no_case() {
        let peers = Peers::default();
        assert!(!peers.has(Peer::Firecracker) && !peers.has(Peer::CloudHypervisor));
    }
}
