//! Contents of each image.

use super::disk::{self, Ids, Layout};
use super::tree::Tree;
use crate::debian;
use crate::progress::Step;
use crate::shell;
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::path::Path;

const CUSTOMIZE: &str = include_str!("customize.sh");
const INITRAMFS: &str = include_str!("initramfs.sh");
const INIT: &str = include_str!("init");
/// Source of the disk builder, which is part of a disk's recipe too.
const ASSEMBLY: &str = include_str!("disk.rs");

/// Size of a disk. The file is sparse, and there is space for a second kernel.
const DISK_BYTES: u64 = 3 << 30;

/// Packages of every disk image.
const SYSTEM: &[&str] = &[
    "busybox",
    "dbus",
    "dmidecode",
    "e2fsprogs",
    "fdisk",
    "initramfs-tools",
    "iproute2",
    "kmod",
    "libpam-systemd",
    "pciutils",
    "procps",
    "systemd",
    "systemd-sysv",
    "udev",
    "zstd",
];

/// Packages of a disk image for a cloud guest.
const CLOUD: &[&str] = &[
    "cloud-guest-utils",
    "cloud-init",
    "iputils-ping",
    "kexec-tools",
    "openssh-server",
    "sudo",
];

/// One image.
#[derive(Debug)]
pub struct Recipe {
    /// Its name.
    pub name: &'static str,
    /// One-line description.
    pub about: &'static str,
    suite: &'static str,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Disk {
        layout: Layout,
        packages: &'static [&'static [&'static str]],
        /// Regular expression of kernel packages. The second newest is installed, and the newest lies beside it.
        kernel: &'static str,
    },
    Initramfs {
        /// Packages that contain `programs`.
        packages: &'static [&'static str],
        /// Programs in `/usr/bin` or `/usr/sbin` that go into the initramfs, with the libraries they need.
        programs: &'static [&'static str],
        /// Kernel modules in addition to those of every initramfs.
        modules: &'static [&'static str],
    },
}

/// An initramfs with busybox alone.
const SMALL: Kind = Kind::Initramfs {
    packages: &[],
    programs: &[],
    modules: &[],
};

/// An initramfs with disk tools. Debian's fio has sixty libraries: too much for guests whose boot is timed.
const DISKS: Kind = Kind::Initramfs {
    packages: &["fio", "sg3-utils"],
    programs: &[
        "fio",
        "sg_compare_and_write",
        "sg_get_lba_status",
        "sg_inq",
        "sg_luns",
        "sg_modes",
        "sg_opcodes",
        "sg_persist",
        "sg_raw",
        "sg_readcap",
        "sg_rep_zones",
        "sg_requests",
        "sg_reset",
        "sg_turs",
        "sg_unmap",
        "sg_vpd",
        "sg_write_same",
    ],
    modules: &[],
};

/// An initramfs with network tools: busybox has a DHCP client, but sets few link options and no offloads.
const NETWORK: Kind = Kind::Initramfs {
    packages: &["ethtool", "iproute2", "iputils-ping"],
    programs: &["ethtool", "ip", "ping"],
    modules: &["virtio_net", "8021q"],
};

/// Every image.
pub const ALL: &[Recipe] = &[
    Recipe {
        name: "initramfs-6.1",
        about: "cloud kernel 6.1 and a small initramfs",
        suite: "bookworm",
        kind: SMALL,
    },
    Recipe {
        name: "initramfs-6.12",
        about: "cloud kernel 6.12 and a small initramfs",
        suite: "trixie",
        kind: SMALL,
    },
    Recipe {
        name: "initramfs-6.12-disks",
        about: "cloud kernel 6.12 and an initramfs with fio and sg3-utils",
        suite: "trixie",
        kind: DISKS,
    },
    Recipe {
        name: "initramfs-6.12-network",
        about: "cloud kernel 6.12 and an initramfs with a network, ip and ethtool",
        suite: "trixie",
        kind: NETWORK,
    },
    Recipe {
        name: "debian-12-cloud",
        about: "disk, MBR, GRUB, the cloud kernel before the newest; the newest as a .deb in /root",
        suite: "bookworm",
        kind: Kind::Disk {
            layout: Layout::Mbr,
            packages: &[SYSTEM, CLOUD, &["grub-pc"]],
            kernel: r"linux-image-6\.1\.[0-9.-]+-cloud-amd64",
        },
    },
    Recipe {
        name: "debian-13-cloud",
        about: "disk, GPT, GRUB, cloud kernel",
        suite: "trixie",
        kind: Kind::Disk {
            layout: Layout::Gpt,
            packages: &[SYSTEM, CLOUD, &["grub-pc", "linux-image-cloud-amd64"]],
            kernel: "",
        },
    },
    Recipe {
        name: "debian-13-generic",
        about: "disk, GPT, GRUB, the kernel for any machine",
        suite: "trixie",
        kind: Kind::Disk {
            layout: Layout::Gpt,
            packages: &[SYSTEM, &["grub-pc", "linux-image-amd64"]],
            kernel: "",
        },
    },
    Recipe {
        name: "debian-13-bls",
        about: "disk, GPT, kernel and Boot Loader Specification entry on an EFI system partition",
        suite: "trixie",
        kind: Kind::Disk {
            layout: Layout::Esp,
            packages: &[
                SYSTEM,
                &["dosfstools", "linux-image-cloud-amd64", "mtools", "systemd-boot"],
            ],
            kernel: "",
        },
    },
];

impl Recipe {
    /// Hash of this recipe in its current form. A change of the text changes the hash.
    pub fn hash(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        digest.update(format!("{self:?}"));
        let parts: &[&str] = match self.kind {
            Kind::Disk { .. } => &[CUSTOMIZE, ASSEMBLY],
            Kind::Initramfs { .. } => &[INITRAMFS, INIT],
        };
        for part in parts {
            digest.update([0]);
            digest.update(part);
        }
        digest.finalize().into()
    }

    /// Makes the image in the empty folder `folder`: `disk.img`, or `vmlinuz` and `initrd`.
    pub fn build(&self, step: &Step, folder: &Path) -> Result<()> {
        let root = folder.join("root");
        match self.kind {
            Kind::Disk {
                layout,
                packages,
                kernel,
            } => {
                let ids = Ids::from_seed(&self.hash());
                let variables = variables(layout, kernel, &ids);
                self.bootstrap(step, &packages.concat(), &(variables + CUSTOMIZE), &root)?;
                let disk = folder.join("disk.img");
                disk::assemble(step, &Tree::new(root.clone()), layout, &ids, DISK_BYTES, &disk)?;
            }
            Kind::Initramfs {
                packages,
                programs,
                modules,
            } => {
                let always: &[&str] = &[
                    "busybox-static",
                    "cpio",
                    "kmod",
                    "linux-image-cloud-amd64",
                    "xz-utils",
                ];
                let script = format!(
                    "init={}\nprograms={}\nmodules={}\n{INITRAMFS}",
                    shell::quote(INIT),
                    shell::quote(&programs.join(" ")),
                    shell::quote(&modules.join(" "))
                );
                self.bootstrap(step, &[always, packages].concat(), &script, &root)?;
                for (from, to) in [("boot/vmlinuz", "vmlinuz"), ("boot/initramfs", "initrd")] {
                    std::fs::copy(root.join(from), folder.join(to)).with_context(|| format!("no {from}"))?;
                }
            }
        }
        std::fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
    }

    fn bootstrap(&self, step: &Step, packages: &[&str], customize: &str, root: &Path) -> Result<()> {
        let recipe = debian::Recipe {
            suite: self.suite,
            packages,
            aside: &[],
            customize,
        };
        recipe.bootstrap(step, root)
    }
}

/// The variables of `customize.sh`.
fn variables(layout: Layout, kernel: &str, ids: &Ids) -> String {
    let (partmap, loader) = match layout {
        Layout::Mbr => ("msdos", "grub"),
        Layout::Gpt => ("gpt", "grub"),
        Layout::Esp => ("gpt", "bls"),
    };
    let part_id = ids.root_partuuid(layout);
    [
        ("kernel", kernel),
        ("root_id", &ids.filesystem),
        ("part_id", &part_id),
        ("esp_id", &ids.esp),
        ("partmap", partmap),
        ("loader", loader),
    ]
    .map(|(name, value)| format!("{name}={}\n", shell::quote(value)))
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_image_has_a_name_and_a_hash_of_its_own() {
        for (i, recipe) in ALL.iter().enumerate() {
            for other in &ALL[i + 1..] {
                assert_ne!(recipe.name, other.name);
                assert_ne!(recipe.hash(), other.hash());
            }
        }
    }

    #[test]
    fn scripts_are_shell() {
        let ids = Ids::from_seed(&[9; 32]);
        let disk = variables(Layout::Mbr, "a.*b", &ids) + CUSTOMIZE;
        for script in [disk.as_str(), INITRAMFS, INIT] {
            let status = std::process::Command::new("sh")
                .args(["-n", "-c", script])
                .status()
                .expect("sh");
            assert!(status.success());
        }
    }
}
