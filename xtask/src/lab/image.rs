//! The lab's system: Debian 13 with its stock kernel, built once and cached by a hash of its recipe.

use crate::checkout;
use crate::debian::{self, Aside, Recipe};
use crate::packages::{self, Tool, tool};
use crate::progress::Progress;
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::Command;

const SUITE: &str = "trixie";

/// Prefix of the names of folders with unfinished images, which are never used.
const UNFINISHED: &str = "image-unfinished-";

/// Size of the root filesystem; the file is sparse.
const DISK_SIZE: &str = "24G";

const PACKAGES: &[&str] = &[
    // the system itself
    "busybox-static",
    "ca-certificates",
    "cpio",
    "iproute2",
    "kmod",
    "linux-image-cloud-amd64",
    "openssh-server",
    "procps",
    "systemd-sysv",
    "udev",
    "xz-utils",
    // reference programs, among them the lab's own QEMU on the host
    "qemu-system-x86",
    "qemu-utils",
    "seabios",
    "virtiofsd",
    // disks
    "dosfstools",
    "e2fsprogs",
    "fdisk",
    "fio",
    "gdisk",
    "nfs-kernel-server",
    "sg3-utils",
    // network
    "ethtool",
    "iperf3",
    "iputils-ping",
    "netcat-openbsd",
    "nftables",
    "tcpdump",
    // pods
    "containernetworking-plugins",
    "dbus",
    "iptables",
    "runc",
    // registries
    "apache2-utils",
    "docker-registry",
    "openssl",
    "skopeo",
    // debugging and tracing
    "gdb",
    "linux-perf",
    "jq",
    "lsof",
    "python3",
    "socat",
    "strace",
    "trace-cmd",
];

/// The versions of containerd that the tests of pods run, one at a time.
const ASIDE: &[Aside] = &[
    Aside {
        suite: "trixie",
        package: "containerd",
        folder: "/opt/containerd-1.7",
    },
    Aside {
        suite: debian::TESTING,
        package: "containerd",
        folder: "/opt/containerd-2.1",
    },
];

const CUSTOMIZE: &str = include_str!("guest/customize.sh");

const TOOLS: &[Tool] = &[
    tool("mke2fs", "e2fsprogs"),
    tool("ssh", "openssh-client"),
    tool("ssh-keygen", "openssh-client"),
];

/// A finished image in the cache.
#[derive(Debug, Clone)]
pub struct Image {
    /// Hash of its recipe.
    pub hash: String,
    folder: PathBuf,
}

impl Image {
    /// The root filesystem, raw.
    pub fn disk(&self) -> PathBuf {
        self.folder.join("disk.img")
    }

    /// The kernel.
    pub fn kernel(&self) -> PathBuf {
        self.root().join("boot/lab-vmlinuz")
    }

    /// The initrd.
    pub fn initrd(&self) -> PathBuf {
        self.root().join("boot/lab-initrd")
    }

    /// The tree from which the filesystem was made.
    pub fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    /// The image's program `path` (below its root) as a command on this machine, run through the image's own loader and
    /// libraries, so that it does not depend on this machine's C library.
    pub fn command(&self, path: &str) -> Command {
        let root = self.root();
        let libraries = [root.join("usr/lib/x86_64-linux-gnu"), root.join("usr/lib")];
        let mut joined = std::ffi::OsString::new();
        for (index, library) in libraries.iter().enumerate() {
            if index > 0 {
                joined.push(":");
            }
            joined.push(library);
        }
        let mut command = Command::new(root.join("usr/lib64/ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(joined).arg(root.join(path));
        command
    }
}

/// Hash of the recipe in this checkout.
pub fn hash() -> String {
    let mut digest = Sha256::new();
    for part in [SUITE, DISK_SIZE, CUSTOMIZE]
        .into_iter()
        .chain(PACKAGES.iter().copied())
        .chain(
            ASIDE
                .iter()
                .flat_map(|aside| [aside.suite, aside.package, aside.folder]),
        )
    {
        digest.update(part.as_bytes());
        digest.update([0]);
    }
    digest.finalize()[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// The image of the current recipe, from the cache or built now.
pub fn ensure(progress: &Progress) -> Result<Image> {
    packages::ensure(progress, TOOLS)?;
    let lab = checkout::folder(checkout::cache()?.join("lab"))?;
    let hash = hash();
    let image = Image {
        folder: lab.join(format!("image-{hash}")),
        hash,
    };
    if image.disk().exists() {
        return Ok(image);
    }
    if !rustix::process::geteuid().is_root() {
        bail!(
            "the lab's image is made by root, once: run {}",
            checkout::as_root("lab image")
        );
    }
    let _lock = checkout::lock(&lab.join("image.lock"), "makes the lab's image")?;
    if image.disk().exists() {
        return Ok(image);
    }
    debian::ensure_tools(progress)?;
    remove_old(&lab, &image.folder)?;
    let aside = lab.join(format!("{UNFINISHED}{}", std::process::id()));
    build(progress, &aside)?;
    std::fs::rename(&aside, &image.folder)?;
    Ok(image)
}

/// Builds the image in the folder `aside`.
fn build(progress: &Progress, aside: &Path) -> Result<()> {
    std::fs::create_dir_all(aside)?;
    let root = aside.join("root");
    let step = progress.step("making the lab's Debian");
    let recipe = Recipe {
        suite: SUITE,
        packages: PACKAGES,
        aside: ASIDE,
        customize: CUSTOMIZE,
    };
    recipe.bootstrap(&step, &root)?;
    step.done();
    let mut mke2fs = Command::new("mke2fs");
    mke2fs
        .env("PATH", path_with_sbin())
        .args(["-q", "-F", "-t", "ext4", "-O", "^has_journal,^metadata_csum"])
        .args([
            "-E",
            "lazy_itable_init=1,nodiscard",
            "-m",
            "0",
            "-L",
            "husk-lab",
            "-d",
        ])
        .arg(&root)
        .arg(aside.join("disk.img"))
        .arg(DISK_SIZE);
    progress.run("making the lab's disk", &mut mke2fs)?;
    Ok(())
}

fn path_with_sbin() -> std::ffi::OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}

/// Removes the leftovers of failed builds, and images of earlier recipes except the newest, which another checkout may
/// still use.
fn remove_old(lab: &Path, keep: &Path) -> Result<()> {
    let mut old = Vec::new();
    for entry in std::fs::read_dir(lab)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = entry.path();
        if name.starts_with(UNFINISHED) {
            // A build that is being ended may still write there; then the next build removes the rest.
            let _ = remove(&path);
        } else if name.starts_with("image-") && path.is_dir() && path != keep {
            old.push((entry.metadata()?.modified()?, path));
        }
    }
    old.sort();
    old.pop();
    old.iter().try_for_each(|(_, path)| remove(path))
}

fn remove(folder: &Path) -> Result<()> {
    std::fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))
}
