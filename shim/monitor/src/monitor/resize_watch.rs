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
use rustix::io::Errno;

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

impl ImageGrowth {
    /// Extends the image by `allocate`, which never shrinks it: the monitor of another VM may have extended it further.
    fn apply(
        &self,
        image: &OwnedFd,
        allocate: impl FnOnce(&Range<u64>) -> rustix::io::Result<()>,
    ) -> io::Result<()> {
        let end = self.bytes.end;
        let bytes = match self.allocated {
            true => self.bytes.clone(),
            // The last block is allocated, and keeps what is there.
            false => end.saturating_sub(1)..end,
        };
        match allocate(&bytes) {
            // NFSv3 and some FUSE file systems cannot allocate.
            Err(Errno::OPNOTSUPP) if u64::try_from(fstat(image)?.st_size).is_ok_and(|size| size < end) => {
                Ok(ftruncate(image, end)?)
            }
            Err(Errno::OPNOTSUPP) => Ok(()),
            done => Ok(done?),
        }
    }
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
        let Some(growth) = self.growth(claim)? else {
            return Ok(());
        };
        let image = reopen(&self.file, OFlags::WRONLY)?;
        let allocate = |bytes: &Range<u64>| {
            fallocate(
                &image,
                FallocateFlags::empty(),
                bytes.start,
                bytes.end - bytes.start,
            )
        };
        growth.apply(&image, allocate)
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
    use std::os::unix::fs::FileExt;

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
        let allocated = fstat(&file).unwrap().st_blocks as u64 * SECTOR;
        assert!(allocated < MIB, "a sparse image stays sparse: {allocated}");
        probe.extend(claim(3)).unwrap();
        assert_eq!(probe.bytes().unwrap(), 4 * MIB);

        fallocate(&file, FallocateFlags::empty(), 0, 4 * MIB).unwrap();
        probe.extend(claim(5)).unwrap();
        let stat = fstat(&file).unwrap();
        assert_eq!(probe.bytes().unwrap(), 5 * MIB);
        assert!(stat.st_blocks as u64 * SECTOR >= 5 * MIB, "{stat:?}");
    }

    #[test]
    fn image_that_another_vm_has_extended_is_not_cut() {
        const KIB: u64 = 1 << 10;
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * KIB).unwrap();
        let probe = SizeProbe::of(&file).unwrap();
        for allocated in [false, true] {
            for can_allocate in [false, true] {
                let bytes = 4 * KIB..8 * KIB;
                let growth = ImageGrowth { bytes, allocated };
                // Its guest has written there already.
                file.write_all_at(&[7; 16 << 10], 0).unwrap();
                let image = reopen(&file, OFlags::WRONLY).unwrap();
                let allocate = |bytes: &Range<u64>| match can_allocate {
                    true => fallocate(
                        &image,
                        FallocateFlags::empty(),
                        bytes.start,
                        bytes.end - bytes.start,
                    ),
                    false => Err(Errno::OPNOTSUPP),
                };
                growth.apply(&image, allocate).unwrap();
                assert_eq!(probe.bytes().unwrap(), 16 * KIB);
                let mut kept = [0; 16 << 10];
                file.read_exact_at(&mut kept, 0).unwrap();
                assert_eq!(kept, [7; 16 << 10]);
            }
        }
    }

    #[test]
    fn an_allocated_image_grows_where_the_file_system_cannot_allocate() {
        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        let growth = ImageGrowth {
            bytes: 4096..8192,
            allocated: true,
        };
        growth.apply(&file, |_| Err(Errno::OPNOTSUPP)).unwrap();
        assert_eq!(fstat(&file).unwrap().st_size, 8192);
        let full = growth.apply(&file, |_| Err(Errno::NOSPC)).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    }
}
