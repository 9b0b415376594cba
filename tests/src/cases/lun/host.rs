//! SCSI devices of the host that kernel modules emulate.

use crate::harness::context::TestContext;
use crate::harness::{PAUSE, poll};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Time limit for a device to appear or disappear.
const SOON: Duration = Duration::from_secs(30);

fn wait<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> Result<T> {
    poll(SOON, PAUSE, || {
        Ok(ready().ok_or_else(|| format!("{what} does not come")))
    })
}

/// The block devices of SCSI units of this vendor, in the order of their addresses.
fn disks(vendor: &str) -> Vec<PathBuf> {
    let mut units: Vec<_> = fs::read_dir("/sys/class/scsi_device")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("device"))
        .filter(|unit| fs::read_to_string(unit.join("vendor")).is_ok_and(|text| text.trim() == vendor))
        .collect();
    units.sort();
    let name = |unit: &PathBuf| fs::read_dir(unit.join("block")).ok()?.next()?.ok();
    let device = |unit| Some(Path::new("/dev").join(name(unit)?.file_name()));
    units
        .iter()
        .filter_map(device)
        .filter(|path| path.exists())
        .collect()
}

/// A disk in memory behind `scsi_debug`, with two LUNs. Removed when it is dropped.
#[derive(Debug)]
pub struct ScsiDebug {
    /// Its LUNs, which have the same content.
    pub disks: Vec<PathBuf>,
}

/// Identification of `scsi_debug` in these tests.
pub const VENDOR: &str = "HUSKTEST";
pub const PRODUCT: &str = "PASSED-ON";

impl ScsiDebug {
    pub fn new(ctx: &TestContext) -> Result<Self> {
        ctx.needs_root()?;
        let (vendor, product) = (format!("inq_vendor={VENDOR}"), format!("inq_product={PRODUCT}"));
        let words = [
            "modprobe",
            "scsi_debug",
            "dev_size_mb=64",
            "max_luns=2",
            "num_parts=1",
            "lbpu=1",
            "lbpws=1",
            "lbpws10=1",
            &vendor,
            &product,
            "inq_rev=0042",
        ];
        ctx.host(&words)?;
        let mut made = Self { disks: Vec::new() };
        made.disks = wait("scsi_debug", || {
            let disks = disks(VENDOR);
            (disks.len() == 2).then_some(disks)
        })?;
        Ok(made)
    }

    /// Injects the errors that scsi_debug(4) numbers.
    pub fn fail(&self, options: u32) -> Result<()> {
        let path = "/sys/bus/pseudo/drivers/scsi_debug/opts";
        fs::write(path, options.to_string()).with_context(|| format!("cannot write {path}"))
    }

    /// Removes a disk while it may be open.
    pub fn pull(&self, disk: &Path) -> Result<()> {
        let name = disk.file_name().context("no name")?;
        let path = Path::new("/sys/block").join(name).join("device/delete");
        fs::write(&path, "1").with_context(|| format!("cannot write {}", path.display()))
    }

    /// Unloads the module, which fails while it is in use.
    pub fn unload(&self, ctx: &TestContext) -> Result<()> {
        ctx.host(&["rmmod", "scsi_debug"])?;
        wait("its end", || disks(VENDOR).is_empty().then_some(()))
    }
}

impl Drop for ScsiDebug {
    fn drop(&mut self) {
        if Path::new("/sys/module/scsi_debug").exists() {
            let _ = Command::new("rmmod").arg("scsi_debug").status();
        }
    }
}

/// A disk of the kernel's own SCSI target, in a file, on this machine, with persistent reservations. Removed when it is
/// dropped.
#[derive(Debug)]
pub struct Loopback {
    pub disk: PathBuf,
}

const CONFIG: &str = "/sys/kernel/config/target";
const STORE: &str = "core/fileio_0/husk";
const FABRIC: &str = "loopback";
const TARGET: &str = "loopback/naa.5001405000000001";
const GROUP: &str = "loopback/naa.5001405000000001/tpgt_1";
const LUN: &str = "loopback/naa.5001405000000001/tpgt_1/lun/lun_0";
const LINK: &str = "loopback/naa.5001405000000001/tpgt_1/lun/lun_0/husk";

fn config(path: &str) -> PathBuf {
    Path::new(CONFIG).join(path)
}

fn write(path: &str, text: &str) -> Result<()> {
    let path = config(path);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

impl Loopback {
    pub fn new(ctx: &TestContext) -> Result<Self> {
        ctx.needs_root()?;
        for module in ["target_core_mod", "target_core_file", "tcm_loop"] {
            ctx.host(&["modprobe", module])?;
        }
        // Created here, so that a failure leaves nothing behind.
        let mut made = Self { disk: PathBuf::new() };
        // The target keeps registrations here that outlive a loss of power (APTPL).
        fs::create_dir_all("/var/target/pr")?;
        let image = ctx.path("loopback.img");
        fs::create_dir_all(config(STORE))?;
        let size = 32 << 20;
        write(
            &format!("{STORE}/control"),
            &format!("fd_dev_name={},fd_dev_size={size}", image.display()),
        )?;
        write(&format!("{STORE}/wwn/vpd_unit_serial"), "husk-loopback")?;
        write(&format!("{STORE}/enable"), "1")?;
        fs::create_dir_all(config(GROUP))?;
        write(&format!("{GROUP}/nexus"), "naa.5001405000000002")?;
        fs::create_dir(config(LUN))?;
        std::os::unix::fs::symlink(config(STORE), config(LINK))?;
        made.disk = wait("the loopback disk", || disks("LIO-ORG").pop())?;
        Ok(made)
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        let _ = fs::remove_file(config(LINK));
        for folder in [LUN, GROUP, TARGET, FABRIC, STORE, "core/fileio_0"] {
            let _ = fs::remove_dir(config(folder));
        }
    }
}
