//! hostDisk: a raw image at a path of the node, created if the manifest says so.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, RenameFlags, fstatvfs, linkat, openat, renameat_with, unlinkat,
};
use rustix::io::Errno;
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
    create_in(&parent, path.file_name().unwrap_or_default(), bytes, |_| ())
}

/// Creates an image in a directory. `bytes` are rounded down to whole MiB, and by up to a tenth if space is short.
/// The image gets its name when it is complete, and `set_owner` has been called.
pub(super) fn create_in(
    directory: &PathHandle,
    name: impl AsRef<Path>,
    bytes: u64,
    set_owner: impl Fn(&File),
) -> Result<(), VolumeFault> {
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
    let complete = |file: &File| {
        file.set_len(size)?;
        set_owner(file);
        file.sync_all()
    };
    let made = match nameless(handle, name, &complete) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            renamed(handle, name, &complete)
        }
        other => other,
    };
    made.map_err(VolumeFault::io(&path))?;
    info!(path = %path.display(), size, "made an image");
    Ok(())
}

type Complete<'a> = &'a dyn Fn(&File) -> io::Result<()>;

const MODE: Mode = Mode::from_raw_mode(0o660);

/// Creates a file that gets its name when it is complete. An existing file or link of that name stays.
fn nameless(directory: &OwnedFd, name: &Path, complete: Complete<'_>) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file = File::from(openat(directory, ".", flags, MODE)?);
    complete(&file)?;
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(linkat(CWD, own, directory, name, AtFlags::SYMLINK_FOLLOW)?)
}

/// As [`nameless`], for file systems without O_TMPFILE.
fn renamed(directory: &OwnedFd, name: &Path, complete: Complete<'_>) -> io::Result<()> {
    let temporary = format!(".husk-{}", uuid::Uuid::new_v4());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = File::from(openat(directory, &temporary, flags, MODE)?);
    let done = complete(&file).and_then(|()| {
        match renameat_with(directory, &temporary, directory, name, RenameFlags::NOREPLACE) {
            // NFS cannot rename without replacing.
            Err(Errno::INVAL) => match linkat(directory, &temporary, directory, name, AtFlags::empty()) {
                Err(Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP) => named(directory, name, complete),
                other => Ok(other?),
            },
            other => Ok(other?),
        }
    });
    // A renamed file has this name no longer.
    let _ = unlinkat(directory, &temporary, AtFlags::empty());
    done
}

/// As [`renamed`], for file systems without links either, such as some of FUSE's. A power cut may leave a part.
fn named(directory: &OwnedFd, name: &Path, complete: Complete<'_>) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = File::from(openat(directory, name, flags, MODE)?);
    complete(&file).inspect_err(|_| {
        let _ = unlinkat(directory, name, AtFlags::empty());
    })
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
        let remedy = "create it, or set hostDisk.type to DiskOrCreate and hostDisk.capacity";
        assert_eq!(missing, format!("{} does not exist: {remedy}", path.display()));
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

    #[test]
    fn an_image_has_its_name_when_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let folder = PathHandle::on_host(dir.path()).unwrap();
        let path = dir.path().join("disk.img");
        let checked = std::cell::Cell::new(0);
        let is_unnamed = |file: &File| {
            assert_eq!(file.metadata().unwrap().len(), MIB);
            assert!(!path.exists());
            checked.set(checked.get() + 1);
        };
        create_in(&folder, "disk.img", MIB, is_unnamed).unwrap();
        assert_eq!((checked.get(), std::fs::metadata(&path).unwrap().len()), (1, MIB));
    }

    #[test]
    fn a_failed_or_second_image_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let folder = PathHandle::on_host(dir.path()).unwrap();
        let name = Path::new("disk.img");
        let write = |mut file: &File| io::Write::write_all(&mut file, b"new");
        let fail = |_: &File| Err(io::ErrorKind::StorageFull.into());
        for make in [nameless, renamed, named] {
            make(folder.handle(), name, &fail).unwrap_err();
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
            make(folder.handle(), name, &write).unwrap();
            assert_eq!(std::fs::read(dir.path().join(name)).unwrap(), b"new");
            let second = make(folder.handle(), name, &|_| Ok(())).unwrap_err();
            assert_eq!(second.kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(std::fs::read(dir.path().join(name)).unwrap(), b"new");
            std::fs::remove_file(dir.path().join(name)).unwrap();
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        }
    }
}
