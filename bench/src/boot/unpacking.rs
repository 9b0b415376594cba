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
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use xtask::packages::{Tool, tool};

/// Name of the unpacked kernel in the benchmark's folder.
pub const ELF: &str = "vmlinux";
/// Name of the kernel as `xz` packed it.
pub const PACKED: &str = "vmlinux.xz";

/// Offsets in the boot protocol's header of the numbers that locate the packed kernel.
const SETUP_SECTS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// Length of the unpacked size that follows a packed kernel.
const SIZE_LEN: usize = 4;

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

/// Range of the packed kernel in a bzImage. Its size when it is unpacked follows, in four bytes.
fn packed(image: &[u8]) -> Result<Range<usize>> {
    let number = |at: usize| -> Result<usize> {
        let bytes = image.get(at..at + 4).context("the kernel is no bzImage")?;
        Ok(u32::from_le_bytes(bytes.try_into()?) as usize)
    };
    let setup = match image.get(SETUP_SECTS).context("the kernel is no bzImage")? {
        0 => 4,
        sectors => usize::from(*sectors),
    };
    let start = (setup + 1) * 512 + number(PAYLOAD_OFFSET)?;
    let len = number(PAYLOAD_LENGTH)?;
    ensure!(len >= SIZE_LEN, "the bzImage has no kernel");
    ensure!(start + len <= image.len(), "the bzImage is cut off");
    Ok(start..start + len - SIZE_LEN)
}

/// A bzImage whose kernel is what [`pack`] returned. The decompressor in it stays as it was, so only a VMM that unpacks
/// the kernel can boot it.
pub fn with_xz(image: &[u8], xz: &[u8]) -> Result<Vec<u8>> {
    let range = packed(image)?;
    ensure!(xz.len() <= range.len(), "xz packs the kernel worse than it was");
    let payload = [xz, &image[range.end..][..SIZE_LEN]].concat();
    let mut image = image.to_vec();
    image[range.start..][..payload.len()].copy_from_slice(&payload);
    image[PAYLOAD_LENGTH..][..4].copy_from_slice(&u32::try_from(payload.len())?.to_le_bytes());
    Ok(image)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_in_a_bzimage_is_replaced() {
        let mut image = vec![0; 1024];
        image[SETUP_SECTS] = 1;
        image[PAYLOAD_LENGTH..][..4].copy_from_slice(&204_u32.to_le_bytes());
        image.extend([&[0; 200][..], b"size"].concat());
        let replaced = with_xz(&image, &[7; 100]).expect("it fits");
        assert_eq!(packed(&replaced).expect("a kernel"), 1024..1124);
        assert_eq!(replaced[1024..1128], [&[7; 100][..], b"size"].concat());
        assert!(with_xz(&image, &[7; 201]).is_err());
        assert!(with_xz(&image[..image.len() - 1], &[7; 100]).is_err());
        assert!(with_xz(&[0; 100], &[7; 100]).is_err());
    }
}
