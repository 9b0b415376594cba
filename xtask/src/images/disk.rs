//! A whole-disk image from a root tree: partition table, filesystems, boot code.

use super::tree::Tree;
use crate::progress::Step;
use anyhow::{Context, Result, ensure};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;

const SECTOR: u64 = 512;
const MIB: u64 = 1 << 20;

/// Partition layout of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// MBR: the boot loader in the gap of 1 MiB, one partition.
    Mbr,
    /// GPT: a BIOS boot partition (number 14, as on Debian's cloud images), the root as number 1.
    Gpt,
    /// GPT: an EFI system partition (number 15), the root as number 1.
    Esp,
}

impl Layout {
    /// First byte of the root filesystem.
    fn root_offset(self) -> u64 {
        match self {
            Self::Mbr => MIB,
            Self::Gpt => 4 * MIB,
            Self::Esp => MIB + ESP_BYTES,
        }
    }

    /// The partition table in sfdisk's language.
    fn table(self, ids: &Ids) -> String {
        let root = self.root_offset() / SECTOR;
        let gpt_root = format!(
            "1: start={root}, type=4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709, uuid={}\n",
            ids.partition
        );
        match self {
            Self::Mbr => format!(
                "label: dos\nlabel-id: 0x{}\nstart={root}, type=83, bootable\n",
                ids.mbr
            ),
            Self::Gpt => format!(
                "label: gpt\nlabel-id: {}\n\
                 14: start=2048, size=6144, type=21686148-6449-6E6F-744E-656564454649\n{gpt_root}",
                ids.disk
            ),
            Self::Esp => format!(
                "label: gpt\nlabel-id: {}\n\
                 15: start=2048, size={}, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B, uuid={}\n{gpt_root}",
                ids.disk,
                ESP_BYTES / SECTOR,
                ids.esp
            ),
        }
    }

    /// Sector where GRUB's core image begins.
    fn core_sector(self) -> u64 {
        match self {
            Self::Mbr => 1,
            Self::Gpt | Self::Esp => MIB / SECTOR,
        }
    }
}

/// Size of the EFI system partition; `customize.sh` makes its filesystem.
const ESP_BYTES: u64 = 128 * MIB;

/// The names by which a disk's parts are found.
#[derive(Debug)]
pub struct Ids {
    /// Disk signature of an MBR, 8 hex digits.
    pub mbr: String,
    /// GUID of a GPT.
    pub disk: String,
    /// UUID of the root filesystem.
    pub filesystem: String,
    /// GUID of the root partition.
    pub partition: String,
    /// GUID of the EFI system partition.
    pub esp: String,
}

impl Ids {
    /// Ids made of `seed` (at least 36 bytes), so that the same recipe gives the same ids.
    pub fn from_seed(seed: &[u8; 32]) -> Self {
        let hex: String = seed.iter().map(|byte| format!("{byte:02x}")).collect();
        let uuid = |at: usize| {
            let digits = &hex[at..at + 32];
            // Version 4, variant 1: some tools refuse others.
            format!(
                "{}-{}-4{}-8{}-{}",
                &digits[..8],
                &digits[8..12],
                &digits[13..16],
                &digits[17..20],
                &digits[20..]
            )
        };
        Self {
            mbr: hex[..8].to_owned(),
            disk: uuid(0),
            filesystem: uuid(8),
            partition: uuid(16),
            esp: uuid(24),
        }
    }

    /// PARTUUID of the root partition.
    pub fn root_partuuid(&self, layout: Layout) -> String {
        match layout {
            Layout::Mbr => format!("{}-01", self.mbr),
            Layout::Gpt | Layout::Esp => self.partition.clone(),
        }
    }
}

/// Makes the sparse raw image `out` of `bytes` bytes from a tree that `customize.sh` has finished.
pub fn assemble(step: &Step, tree: &Tree, layout: Layout, ids: &Ids, bytes: u64, out: &Path) -> Result<()> {
    let disk = File::options()
        .create_new(true)
        .read(true)
        .write(true)
        .open(out)
        .with_context(|| format!("cannot make {}", out.display()))?;
    disk.set_len(bytes)?;
    partition(tree, &layout.table(ids), out)?;

    if layout == Layout::Esp {
        let esp = tree.root().join("var/tmp/esp.img");
        ensure!(
            std::fs::metadata(&esp)?.len() == ESP_BYTES,
            "{} has a wrong size",
            esp.display()
        );
        copy_sparse(&File::open(&esp)?, &disk, MIB)?;
        std::fs::remove_file(&esp)?;
    }

    let offset = layout.root_offset();
    // A GPT's backup takes the last 33 sectors.
    let size = bytes - offset - if layout == Layout::Mbr { 0 } else { MIB };
    let mut mke2fs = tree.tool("usr/sbin/mke2fs");
    mke2fs
        .env("MKE2FS_CONFIG", tree.root().join("etc/mke2fs.conf"))
        .args(["-q", "-F", "-t", "ext4", "-U", &ids.filesystem])
        .arg("-E")
        .arg(format!("offset={offset},lazy_itable_init=0,lazy_journal_init=0"))
        .arg("-d")
        .arg(tree.root())
        .arg(out)
        .arg(format!("{}k", size / 1024));
    step.command(&mut mke2fs)?;

    if layout != Layout::Esp {
        write_grub(tree, layout, &disk)?;
    }
    disk.sync_all()?;
    Ok(())
}

/// Writes the partition table.
fn partition(tree: &Tree, table: &str, out: &Path) -> Result<()> {
    let mut sfdisk = tree.tool("usr/sbin/sfdisk");
    sfdisk
        .args(["--quiet", "--no-reread", "--no-tell-kernel"])
        .arg(out)
        .stdin(Stdio::piped());
    let mut child = sfdisk.spawn().context("cannot start sfdisk")?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(table.as_bytes())?;
    }
    let status = child.wait()?;
    ensure!(status.success(), "sfdisk: {status}, given:\n{table}");
    Ok(())
}

/// Puts GRUB's boot code where a BIOS and the boot code itself look for it, as grub-bios-setup does.
fn write_grub(tree: &Tree, layout: Layout, disk: &File) -> Result<()> {
    let folder = tree.root().join("boot/grub/i386-pc");
    let mut boot = std::fs::read(folder.join("boot.img"))?;
    let mut core = std::fs::read(folder.join("core.img"))?;
    let start = layout.core_sector();
    place_core(&mut boot, &mut core, start)?;
    // Bytes 440 to 511 are the disk signature and the MBR's table.
    disk.write_all_at(&boot[..440], 0)?;
    disk.write_all_at(&core, start * SECTOR)?;
    Ok(())
}

/// Tells GRUB's two first sectors where its core image is: `boot.img` holds its first sector at 0x5C,
/// and the core image's first sector ends with a list of one block (start u64, sectors u16, segment u16).
fn place_core(boot: &mut [u8], core: &mut [u8], start: u64) -> Result<()> {
    ensure!(boot.len() == 512 && core.len() > 512, "not GRUB's images");
    ensure!(
        core.len() as u64 <= MIB - SECTOR,
        "GRUB's core image does not fit before 1 MiB"
    );
    boot[0x5c..0x64].copy_from_slice(&start.to_le_bytes());
    let list = &mut core[500..512];
    ensure!(
        list[..8] == 2u64.to_le_bytes(),
        "GRUB's core image has an unexpected block list"
    );
    list[..8].copy_from_slice(&(start + 1).to_le_bytes());
    Ok(())
}

/// Copies `from` into `to` at `offset`, leaving out blocks of zeros.
fn copy_sparse(from: &File, to: &File, offset: u64) -> Result<()> {
    let mut block = vec![0; 64 << 10];
    let mut at = 0;
    loop {
        let n = from.read_at(&mut block, at)?;
        if n == 0 {
            return Ok(());
        }
        if block[..n].iter().any(|&byte| byte != 0) {
            to.write_all_at(&block[..n], offset + at)?;
        }
        at += n as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_stable_and_distinct() {
        let seed = std::array::from_fn(|i| i as u8 * 7);
        let ids = Ids::from_seed(&seed);
        assert_eq!(ids.filesystem, Ids::from_seed(&seed).filesystem);
        let all = [&ids.disk, &ids.filesystem, &ids.partition, &ids.esp];
        for (i, id) in all.iter().enumerate() {
            assert_eq!(id.len(), 36);
            assert!(all[i + 1..].iter().all(|other| other != id));
        }
        assert_eq!(ids.root_partuuid(Layout::Mbr), "00070e15-01");
    }

    #[test]
    fn core_image_gets_its_prefix() {
        let mut boot = vec![0; 512];
        let mut core = vec![0; 1024];
        core[500] = 2;
        place_core(&mut boot, &mut core, 2048).expect("placed");
        assert_eq!(boot[0x5c..0x64], 2048u64.to_le_bytes());
        assert_eq!(core[500..508], 2049u64.to_le_bytes());
        assert!(place_core(&mut boot, &mut [0; 1024], 1).is_err());
    }
}
