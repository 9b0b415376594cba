//! hostDisk: a raw image at a path of the node, created if the manifest says so.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, fstatvfs, openat, unlinkat};
use tracing::{info, warn};

use super::error::VolumeFault;
use super::path_handle::PathHandle;

const MIB: u64 = 1 << 20;
/// Bytes that KubeVirt leaves free on the file system of a new image.
const RESERVE: u64 = 131_072;

/// Finds the file by `at`, and creates it with `create_bytes` if it is missing. An existing file is used unchanged.
pub(super) fn find(
    path: &Path,
    create_bytes: Option<u64>,
    at: impl Fn(&Path) -> io::Result<PathHandle>,
) -> Result<PathHandle, VolumeFault> {
    match (at(path), create_bytes) {
        (Err(e), Some(bytes)) if e.kind() == io::ErrorKind::NotFound => create(path, bytes)?,
        (Err(e), None) if e.kind() == io::ErrorKind::NotFound => {
            return Err(VolumeFault::NoHostDisk(path.to_owned()));
        }
        (found, _) => return found.map_err(VolumeFault::io(path)),
    }
    at(path).map_err(VolumeFault::io(path))
}

fn create(path: &Path, bytes: u64) -> Result<(), VolumeFault> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(parent)
        .map_err(VolumeFault::io(parent))?;
    let parent = PathHandle::on_host(parent).map_err(VolumeFault::io(parent))?;
    create_in(&parent, path.file_name().unwrap_or_default(), bytes).map(drop)
}

/// Creates an image in a directory. `bytes` are rounded down to whole MiB, and by up to a tenth if space is short.
pub(super) fn create_in(
    directory: &PathHandle,
    name: impl AsRef<Path>,
    bytes: u64,
) -> Result<File, VolumeFault> {
    let (handle, name) = (directory.handle(), name.as_ref());
    let path = directory.path.join(name);
    let space = fstatvfs(handle).map_err(VolumeFault::io(&directory.path))?;
    let available = space
        .f_bavail
        .saturating_mul(space.f_frsize)
        .saturating_sub(RESERVE);
    let size = size_to_create(bytes, available).ok_or_else(|| VolumeFault::NoSpace {
        path: path.clone(),
        demanded: bytes,
        available,
    })?;
    if size < MIB {
        return Err(VolumeFault::TooSmall);
    }
    if size < bytes / MIB * MIB {
        warn!(path = %path.display(), demanded = bytes, size, "little space: the image is smaller than requested (within 10 %)");
    }
    // With EXCL a dangling symbolic link is not followed.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let made = openat(handle, name, flags, Mode::from_raw_mode(0o660));
    let file = File::from(made.map_err(VolumeFault::io(&path))?);
    if let Err(source) = file.set_len(size) {
        let _ = unlinkat(handle, name, AtFlags::empty());
        return Err(VolumeFault::Io { path, source });
    }
    info!(path = %path.display(), size, "made an image");
    Ok(file)
}

/// Whole MiB of the demanded size, or of the available space if that is at least 90 % of it.
fn size_to_create(demanded: u64, available: u64) -> Option<u64> {
    let size = demanded.min(available);
    (size >= demanded - demanded / 10).then_some(size / MIB * MIB)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(path: &Path, create_bytes: Option<u64>) -> Result<PathHandle, VolumeFault> {
        super::find(path, create_bytes, PathHandle::on_host)
    }

    #[test]
    fn sizes_are_whole_mebibytes_and_ten_percent_are_tolerated() {
        assert_eq!(size_to_create(10 * MIB + 5, u64::MAX), Some(10 * MIB));
        assert_eq!(size_to_create(100 * MIB, 90 * MIB), Some(90 * MIB));
        assert_eq!(size_to_create(100 * MIB, 90 * MIB - 1), None);
        assert_eq!(size_to_create(MIB - 1, u64::MAX), Some(0));
    }

    #[test]
    fn an_image_is_made_once_with_its_folder_and_then_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/disk.img");
        let missing = find(&path, None).unwrap_err().to_string();
        let way_out = "create it, or set hostDisk.type to DiskOrCreate and hostDisk.capacity";
        assert_eq!(missing, format!("{} does not exist: {way_out}", path.display()));
        find(&path, Some(3 * MIB + 1)).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 3 * MIB);
        find(&path, Some(9 * MIB)).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 3 * MIB);
        let huge = find(&dir.path().join("huge.img"), Some(u64::MAX))
            .unwrap_err()
            .to_string();
        assert!(
            huge.contains("not enough space, demanded size 18446744073709551615 B is bigger"),
            "{huge}"
        );
        assert!(!dir.path().join("huge.img").exists());
        let small = find(&dir.path().join("small.img"), Some(MIB - 1)).unwrap_err();
        assert!(matches!(small, VolumeFault::TooSmall) && !dir.path().join("small.img").exists());
    }
}
