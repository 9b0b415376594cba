//! Images that a client passes as open descriptors.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use husk_vmi::FileId;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};

use super::error::VolumeFault;
use super::path_handle::PathHandle;

/// Name of the image in errors.
const NAME: &str = "the descriptor";

/// Identity of the image or block device behind a descriptor.
///
/// # Errors
/// The file has another type; the descriptor is not open for reading or, unless `read_only`, for writing.
pub fn identify(fd: &OwnedFd, read_only: bool) -> Result<FileId, VolumeFault> {
    let stat = fstat(fd).map_err(VolumeFault::io(NAME))?;
    let flags = fcntl_getfl(fd).map_err(VolumeFault::io(NAME))?;
    // The image is reopened, which must not give more access than the descriptor.
    if flags.contains(OFlags::PATH) {
        return Err(VolumeFault::Descriptor("is only a path (O_PATH): open the file"));
    }
    match (flags & OFlags::RWMODE, read_only) {
        (OFlags::WRONLY, _) => return Err(VolumeFault::Descriptor("cannot be read: open it for reading")),
        (mode, false) if mode != OFlags::RDWR => {
            let reason = "cannot be written: open it for reading and writing, or add the volume read-only";
            return Err(VolumeFault::Descriptor(reason));
        }
        _ => {}
    }
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(FileId {
            device: stat.st_dev,
            inode: stat.st_ino,
        }),
        FileType::BlockDevice => Ok(FileId {
            device: stat.st_rdev,
            inode: 0,
        }),
        kind => Err(VolumeFault::WrongFileType {
            path: NAME.into(),
            kind,
            wanted: "an image file or a block device",
        }),
    }
}

/// Handle to reopen the image: the passed descriptor shares its flags and position with the client.
pub(super) fn reopenable(fd: &OwnedFd) -> Result<PathHandle, VolumeFault> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    let found = PathHandle::on_host(Path::new(&path)).map_err(VolumeFault::io(NAME))?;
    Ok(found.with_name(NAME))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn passed_descriptors_are_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img");
        let refused = |fd: OwnedFd, read_only| identify(&fd, read_only).unwrap_err().to_string();
        let only_written = File::options().write(true).create_new(true).open(&path);
        let only_written = OwnedFd::from(only_written.unwrap());
        assert!(refused(only_written, false).contains("cannot be read"));
        let only_read = || OwnedFd::from(File::open(&path).unwrap());
        assert!(refused(only_read(), false).contains("cannot be written"));
        let both = OwnedFd::from(File::options().read(true).write(true).open(&path).unwrap());
        // Same file, opened twice.
        assert_eq!(
            identify(&both, false).unwrap(),
            identify(&only_read(), true).unwrap()
        );
        let opath = rustix::fs::open(&path, OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        assert!(refused(opath, true).contains("O_PATH"));
        let null = OwnedFd::from(File::open("/dev/null").unwrap());
        assert_eq!(
            refused(null, true),
            "the descriptor is a character device, not an image file or a block device"
        );
        let directory = OwnedFd::from(File::open(dir.path()).unwrap());
        assert!(refused(directory, true).contains("is a directory"));
    }
}
