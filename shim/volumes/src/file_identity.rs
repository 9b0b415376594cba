//! The identity of a file that a snapshot does not hold.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{FileType, SeekFrom, fstat, seek};
use serde::{Deserialize, Serialize};

/// Identity of a file: that it is the same, and was not written. Of a block device, only the size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FileIdentity {
    /// Size in bytes.
    pub bytes: u64,
    /// Inode number; 0 for a block device.
    pub inode: u64,
    /// Time of the last change of the content, in seconds since 1970; 0 for a block device.
    pub modified_seconds: i64,
    /// The nanoseconds of that time.
    pub modified_nanoseconds: u64,
}

impl FileIdentity {
    /// The identity of an open file, or of one that was only looked up (`O_PATH`).
    pub fn of(fd: impl AsFd) -> io::Result<FileIdentity> {
        let stat = fstat(&fd)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
            let device = File::options()
                .read(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))?;
            return Ok(FileIdentity {
                bytes: seek(&device, SeekFrom::End(0))?,
                inode: 0,
                modified_seconds: 0,
                modified_nanoseconds: 0,
            });
        }
        Ok(FileIdentity {
            bytes: u64::try_from(stat.st_size).map_err(io::Error::other)?,
            inode: stat.st_ino,
            modified_seconds: stat.st_mtime,
            modified_nanoseconds: stat.st_mtime_nsec,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn a_written_or_replaced_file_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        let write = |name: &str| {
            let file = File::create(dir.path().join(name)).unwrap();
            file.set_len(4096).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::new(1000, 7))
                .unwrap();
            file
        };
        let file = write("disk.img");
        let before = FileIdentity::of(&file).unwrap();
        assert_eq!((before.bytes, before.modified_nanoseconds), (4096, 7));
        assert_eq!(before, FileIdentity::of(File::open(&path).unwrap()).unwrap());
        file.write_all_at(b"x", 0).unwrap();
        assert_ne!(before, FileIdentity::of(&file).unwrap());

        write("other.img");
        std::fs::rename(dir.path().join("other.img"), &path).unwrap();
        let replaced = FileIdentity::of(File::open(&path).unwrap()).unwrap();
        assert_eq!(
            FileIdentity {
                inode: before.inode,
                ..replaced
            },
            before
        );
        assert_ne!(replaced, before);
    }
}
