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
    "qemu-guest-agent",
    "sudo",
];

/// Packages for every initramfs.
const INITRAMFS_PACKAGES: &[&str] = &[
    "busybox-static",
    "cpio",
    "kmod",
    "linux-image-cloud-amd64",
    "lz4",
    "xz-utils",
    "zstd",
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

/// An initramfs with QEMU's guest agent, a file system that it can freeze, a network whose addresses it tells, and vsock.
const AGENT: Kind = Kind::Initramfs {
    packages: &["iproute2", "qemu-guest-agent", "socat"],
    programs: &["ip", "qemu-ga", "socat"],
    modules: &[
        "virtio_console",
        "ext4",
        "virtio_net",
        "8021q",
        "vmw_vsock_virtio_transport",
    ],
};

/// An initramfs with a driver of vsock, and socat.
const VSOCK: Kind = Kind::Initramfs {
    packages: &["socat"],
    programs: &["socat"],
    modules: &["vmw_vsock_virtio_transport"],
};

/// An initramfs with the drivers of devices that a manifest asks for.
const DEVICES: Kind = Kind::Initramfs {
    packages: &[],
    programs: &[],
    modules: &["i6300esb", "virtio_console"],
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
        name: "initramfs-6.1-disks",
        about: "cloud kernel 6.1 and an initramfs with fio and sg3-utils",
        suite: "bookworm",
        kind: DISKS,
    },
    Recipe {
        name: "initramfs-6.12-disks",
        about: "cloud kernel 6.12 and an initramfs with fio and sg3-utils",
        suite: "trixie",
        kind: DISKS,
    },
    Recipe {
        name: "initramfs-5.10-disks",
        about: "cloud kernel 5.10 and an initramfs with fio and sg3-utils",
        suite: "bullseye",
        kind: DISKS,
    },
    Recipe {
        name: "initramfs-testing-disks",
        about: "Debian testing's cloud kernel and an initramfs with fio and sg3-utils",
        suite: debian::TESTING,
        kind: DISKS,
    },
    Recipe {
        name: "initramfs-6.12-network",
        about: "cloud kernel 6.12 and an initramfs with a network, ip and ethtool",
        suite: "trixie",
        kind: NETWORK,
    },
    Recipe {
        name: "initramfs-6.12-agent",
        about: "cloud kernel 6.12 and an initramfs with QEMU's guest agent",
        suite: "trixie",
        kind: AGENT,
    },
    Recipe {
        name: "initramfs-6.12-vsock",
        about: "cloud kernel 6.12 and an initramfs with vsock and socat",
        suite: "trixie",
        kind: VSOCK,
    },
    Recipe {
        name: "initramfs-6.12-devices",
        about: "cloud kernel 6.12 and an initramfs with drivers of a watchdog and of ports",
        suite: "trixie",
        kind: DEVICES,
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
}

/// Sorts `recipes` into groups that are made from one root tree: those of an initramfs of the same suite.
pub fn groups(recipes: Vec<&'static Recipe>) -> Vec<Vec<&'static Recipe>> {
    let mut groups: Vec<Vec<&Recipe>> = Vec::new();
    for recipe in recipes {
        let small = |other: &Recipe| matches!(other.kind, Kind::Initramfs { .. });
        let fits =
            |group: &&mut Vec<&Recipe>| small(recipe) && small(group[0]) && group[0].suite == recipe.suite;
        match groups.iter_mut().find(fits) {
            Some(group) => group.push(recipe),
            None => groups.push(vec![recipe]),
        }
    }
    groups
}

/// Makes the images of a group in the empty folder `folder`: `NAME/disk.img`, or `NAME/vmlinuz`, the same
/// kernel unpacked as `NAME/vmlinux`, and `NAME/initrd`.
pub fn build(group: &[&Recipe], step: &Step, folder: &Path) -> Result<()> {
    let root = folder.join("root");
    let (mut packages, mut script) = (Vec::new(), String::new());
    for recipe in group {
        std::fs::create_dir(folder.join(recipe.name))?;
        match recipe.kind {
            Kind::Disk {
                layout,
                packages: wanted,
                kernel,
            } => {
                packages.extend(wanted.concat());
                let ids = Ids::from_seed(&recipe.hash());
                script += &(variables(layout, kernel, &ids) + CUSTOMIZE);
            }
            Kind::Initramfs {
                packages: wanted,
                programs,
                modules,
            } => {
                packages.extend(INITRAMFS_PACKAGES.iter().chain(wanted));
                let variables = format!(
                    "image={}\ninit={}\nprograms={}\nmodules={}\n",
                    recipe.name,
                    shell::quote(INIT),
                    shell::quote(&programs.join(" ")),
                    shell::quote(&modules.join(" "))
                );
                script += &(variables + INITRAMFS);
            }
        }
    }
    packages.sort_unstable();
    packages.dedup();
    let tree = debian::Recipe {
        suite: group[0].suite,
        packages: &packages,
        aside: &[],
        customize: &script,
    };
    tree.bootstrap(step, &root)?;
    for recipe in group {
        let made = folder.join(recipe.name);
        match recipe.kind {
            Kind::Disk { layout, .. } => {
                let ids = Ids::from_seed(&recipe.hash());
                let (tree, disk) = (Tree::new(root.clone()), made.join("disk.img"));
                disk::assemble(step, &tree, layout, &ids, DISK_BYTES, &disk)?;
            }
            Kind::Initramfs { .. } => {
                let boot = root.join("boot");
                let initrd = boot.join(recipe.name).join("initrd");
                for from in [boot.join("vmlinuz"), boot.join("vmlinux"), initrd] {
                    let to = made.join(from.file_name().unwrap_or_default());
                    std::fs::hard_link(&from, to).with_context(|| format!("no {}", from.display()))?;
                }
            }
        }
    }
    std::fs::remove_dir_all(&root).with_context(|| format!("cannot remove {}", root.display()))
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
    fn initramfs_of_one_suite_are_made_together() {
        let sizes: Vec<usize> = groups(ALL.iter().collect()).iter().map(Vec::len).collect();
        assert_eq!(sizes, [2, 6, 1, 1, 1, 1, 1, 1]);
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
