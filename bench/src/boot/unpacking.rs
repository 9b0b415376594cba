//! The time that unpacking the kernel adds to a boot, and the time that `xz` takes for it.

use super::case::Source;
use super::inside::{KERNEL_TIMEOUT, TIMED, since_start};
use super::report::UNPACKING;
use crate::bench_files::BenchFiles;
use crate::guest::USERSPACE;
use crate::message;
use crate::started::{Started, milliseconds};
use crate::vmm::Vmm;
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use xtask::packages::{Tool, tool};

/// Name of the unpacked kernel in the benchmark's folder.
pub const ELF: &str = "vmlinux";
/// Name of the kernel as `xz` packed it.
pub const PACKED: &str = "vmlinux.xz";

/// The program, for the kernel of the benchmark.
pub const XZ: Tool = tool("xz", "xz-utils");

/// Packs a kernel as Linux's build does.
pub fn pack(kernel: &Path) -> Result<Vec<u8>> {
    let mut command = Command::new(XZ.name);
    command.args([
        "--check=crc32",
        "--x86",
        "--lzma2=dict=32MiB",
        "--threads=1",
        "--stdout",
    ]);
    let output = command.arg(kernel).output().context("cannot start xz")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "xz: {}: {errors}", output.status);
    Ok(output.stdout)
}

/// Boots the kernel packed and unpacked, and unpacks it by `xz`.
pub fn measure(files: &BenchFiles, run: u32) -> Result<()> {
    let packed = to_userspace(files)?;
    let unpacked = to_userspace(&files.with_kernel(ELF)?)?;
    let began = Instant::now();
    let status = Command::new(XZ.name)
        .arg("-dc")
        .arg(files.folder.join(PACKED))
        .stdout(Stdio::null())
        .status()
        .context("cannot start xz")?;
    let xz = milliseconds(began.elapsed());
    ensure!(status.success(), "xz: {status}");
    let values = [
        ("untraced_to_userspace_ms", "ms", packed),
        ("elf_to_userspace_ms", "ms", unpacked),
        ("xz_ms", "ms", xz),
        (UNPACKING, "ratio", (packed - unpacked) / xz),
    ];
    message::values("boot", "husk", run, values);
    Ok(())
}

/// Milliseconds from the start of Husk to its guest's user space.
fn to_userspace(files: &BenchFiles) -> Result<f64> {
    let append = format!("{TIMED} husk.do={}", Vmm::Husk.off());
    let vmm = Vmm::Husk.with_source(files, Source::Kernel(&append))?;
    let mut started = Started::start(vmm, KERNEL_TIMEOUT)?;
    let time = since_start(&mut started, USERSPACE)?;
    started.ended()?;
    Ok(time)
}
