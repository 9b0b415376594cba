//! Guests for the cluster's VMs: a kernel with an initramfs, and a disk that boots the same.

use crate::archive;
use crate::checkout;
use crate::images;
use crate::progress::Progress;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The guest image that they are made of.
const SMALL: &str = "initramfs-6.12-agent";
const SCRIPT: &str = include_str!("guest/guest.sh");
/// The disk's boot loader entry.
const ENTRY: &str = "\
title Husk's test guest
linux /boot/vmlinuz
initrd /boot/initrd
options console=ttyS0 quiet husk.do=script,button,shell
";
/// Size of the disk.
const DISK: &str = "64M";

/// Files of the guests.
#[derive(Debug)]
pub struct Guests {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
    /// A raw disk without partitions.
    pub disk: PathBuf,
}

/// Makes the guests in `folder`.
pub fn make(progress: &Progress, folder: &Path) -> Result<Guests> {
    images::ensure(progress, &[SMALL])?;
    let small = images::path(SMALL)?;
    let kernel = small.join("vmlinuz");
    let mut content = std::fs::read(small.join("initrd")).context("the guest's initramfs")?;
    archive::pad(&mut content);
    content.extend(archive::newc(&[("script", SCRIPT.as_bytes())]));
    let initrd = folder.join("initrd");
    std::fs::write(&initrd, content)?;
    let tree = tempfile::tempdir_in(folder)?;
    let boot = checkout::folder(tree.path().join("boot"))?;
    let entries = checkout::folder(boot.join("loader/entries"))?;
    std::fs::copy(&kernel, boot.join("vmlinuz"))?;
    std::fs::copy(&initrd, boot.join("initrd"))?;
    std::fs::write(entries.join("guest.conf"), ENTRY)?;
    let disk = folder.join("disk.img");
    let _ = std::fs::remove_file(&disk);
    progress.run(
        "making the guest's disk",
        Command::new("mke2fs")
            .args(["-q", "-t", "ext4", "-d"])
            .arg(tree.path())
            .arg(&disk)
            .arg(DISK),
    )?;
    Ok(Guests { kernel, initrd, disk })
}
