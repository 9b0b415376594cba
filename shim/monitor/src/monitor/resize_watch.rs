//! Detection of images and block devices that have grown.
//!
//! Sizes are polled. inotify would wake the monitor at each write of the guest, and does not report block devices or
//! files that another machine extends.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, open};

/// Interval between two checks.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(3);

/// Size of a sector in sysfs, in bytes.
const SECTOR: u64 = 512;

/// A reference to a file that can read its size, and neither opens nor locks it (`O_PATH`).
#[derive(Debug)]
pub(super) struct SizeProbe {
    file: OwnedFd,
    /// Size at creation, in bytes.
    pub(super) first: u64,
}

impl SizeProbe {
    /// Creates a probe of an open file.
    pub(super) fn of(file: impl AsFd) -> io::Result<SizeProbe> {
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let mut probe = SizeProbe {
            file: open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?,
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
}

#[cfg(test)]
mod tests {
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
}
