//! Noticing that an image or block device has grown.
//!
//! Sizes are asked for every few seconds. inotify would wake the monitor at each write of the guest, and says nothing of
//! block devices, nor of files that grow from another machine.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, open};

/// How often sizes are asked for.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(3);

/// Bytes of the sectors in which the kernel counts a device.
const SECTOR: u64 = 512;

/// A hold on a file that tells its size, and neither opens nor locks it.
#[derive(Debug)]
pub(super) struct SizeProbe {
    file: OwnedFd,
    /// Bytes it had at first.
    pub(super) first: u64,
}

impl SizeProbe {
    /// Of a file that is open.
    pub(super) fn of(file: impl AsFd) -> io::Result<SizeProbe> {
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let mut probe = SizeProbe {
            file: open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?,
            first: 0,
        };
        probe.first = probe.bytes()?;
        Ok(probe)
    }

    /// Bytes of the file or block device. May wait for a network file system.
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
    fn a_file_tells_its_size_whatever_its_name_is_now() {
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
