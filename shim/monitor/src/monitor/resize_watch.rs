//! Detection of images and block devices that have grown, and growth of the images in claims that have.
//!
//! Sizes are polled. inotify would wake the monitor at each write of the guest, and does not report block devices or
//! files that another machine extends.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use husk_vmi::ClaimSize;
use husk_volumes::reopen;
use rustix::fs::{FallocateFlags, FileType, OFlags, fallocate, fstat, fstatvfs, ftruncate, major, minor};

/// Interval between two checks.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(3);

/// Size of a sector in sysfs, and of a block in `st_blocks`, in bytes.
const SECTOR: u64 = 512;

/// A reference to a file that can read its size, and neither opens nor locks it (`O_PATH`).
#[derive(Debug)]
pub(super) struct SizeProbe {
    file: OwnedFd,
    /// Size at creation, in bytes.
    pub(super) first: u64,
}

/// The bytes by which an image is to be extended.
struct ImageGrowth {
    bytes: Range<u64>,
    /// The image is fully allocated.
    allocated: bool,
}

impl SizeProbe {
    /// Creates a probe of an open file.
    pub(super) fn of(file: impl AsFd) -> io::Result<SizeProbe> {
        let mut probe = SizeProbe {
            file: reopen(file, OFlags::PATH)?,
            first: 0,
        };
        probe.first = probe.bytes()?;
        Ok(probe)
    }

    /// Returns the size of the file or block device, in bytes. May block on a network file system.
    pub(super) fn bytes(&self) -> io::Result<u64> {
        let stat = fstat(&self.file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
            return u64::try_from(stat.st_size).map_err(io::Error::other);
        }
        let device = format!(
            "/sys/dev/block/{}:{}/size",
            major(stat.st_rdev),
            minor(stat.st_rdev)
        );
        let sectors: u64 = std::fs::read_to_string(device)?
            .trim()
            .parse()
            .map_err(io::Error::other)?;
        sectors
            .checked_mul(SECTOR)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Extends an image to the size that its claim has room for, and never shrinks it. A fully allocated image stays
    /// fully allocated. Leaves a block device alone. May block on a network file system.
    pub(super) fn extend(&self, claim: ClaimSize) -> io::Result<()> {
        let Some(ImageGrowth { bytes, allocated }) = self.growth(claim)? else {
            return Ok(());
        };
        let image = reopen(&self.file, OFlags::WRONLY)?;
        match allocated {
            true => fallocate(
                &image,
                FallocateFlags::empty(),
                bytes.start,
                bytes.end - bytes.start,
            )?,
            false => ftruncate(&image, bytes.end)?,
        }
        Ok(())
    }

    /// True if [`SizeProbe::extend`] would extend the image. May block on a network file system.
    pub(super) fn can_extend(&self, claim: ClaimSize) -> io::Result<bool> {
        Ok(self.growth(claim)?.is_some())
    }

    fn growth(&self, claim: ClaimSize) -> io::Result<Option<ImageGrowth>> {
        let stat = fstat(&self.file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(None);
        }
        let unsigned = |size: i64| u64::try_from(size).map_err(io::Error::other);
        let (size, allocated) = (unsigned(stat.st_size)?, unsigned(stat.st_blocks)? * SECTOR);
        let space = fstatvfs(&self.file)?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        let wanted = claim.image_bytes(free.saturating_add(allocated));
        Ok((wanted > size).then_some(ImageGrowth {
            bytes: size..wanted,
            allocated: allocated >= size,
        }))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn probe_reads_the_size_of_a_removed_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        let file = std::fs::File::create(&path).unwrap();
        let probe = SizeProbe::of(&file).unwrap();
        assert_eq!(probe.first, 0);
        std::fs::remove_file(&path).unwrap();
        file.set_len(4096).unwrap();
        drop(file);
        assert_eq!(probe.bytes().unwrap(), 4096);
    }

    /// The size of a claim of `mib` MiB without overhead, as a VMI's status has it.
    pub(in crate::monitor) fn claim(mib: u64) -> ClaimSize {
        let size = format!("{mib}Mi");
        let status = serde_json::json!({"volumeStatus": [{"name": "data", "persistentVolumeClaimInfo": {
            "capacity": {"storage": size}, "requests": {"storage": size}, "filesystemOverhead": "0",
        }}]});
        let vmi = serde_json::json!({
            "kind": "VirtualMachineInstance",
            "apiVersion": "kubevirt.io/v1",
            "metadata": {"name": "vm"},
            "spec": {"domain": {"devices": {}}},
            "status": status,
        });
        match husk_vmi::load(&vmi.to_string()).unwrap().remove(0) {
            husk_vmi::Loaded::Vmi(vmi) => vmi.claims["data"],
            other @ husk_vmi::Loaded::Other { .. } => panic!("{other:?}"),
        }
    }

    #[test]
    fn image_grows_with_its_claim_and_never_shrinks() {
        const MIB: u64 = 1 << 20;
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * MIB).unwrap();
        let probe = SizeProbe::of(&file).unwrap();
        probe.extend(claim(4)).unwrap();
        assert_eq!(probe.bytes().unwrap(), 4 * MIB);
        assert_eq!(fstat(&file).unwrap().st_blocks, 0, "a sparse image stays sparse");
        probe.extend(claim(3)).unwrap();
        assert_eq!(probe.bytes().unwrap(), 4 * MIB);

        fallocate(&file, FallocateFlags::empty(), 0, 4 * MIB).unwrap();
        probe.extend(claim(5)).unwrap();
        let stat = fstat(&file).unwrap();
        assert_eq!(probe.bytes().unwrap(), 5 * MIB);
        assert!(stat.st_blocks as u64 * SECTOR >= 5 * MIB, "{stat:?}");
    }
}
