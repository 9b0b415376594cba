//! Opens images and block devices.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use husk_proto::vmm::v1::disk::Cache;
use husk_vmi::CacheMode;
use rustix::fs::{
    AtFlags, FileType, OFlags, SeekFrom, StatxFlags, fcntl_getfl, fcntl_setfl, fstat, seek, statx,
};
use rustix::io::Errno;

use super::error::VolumeFault;
use super::image_lock::{Sharing, lock_image, when_free};
use super::path_handle::PathHandle;

/// Access mode of a disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct ImageAccess {
    pub(super) read_only: bool,
    /// Other VMs may write the image at the same time.
    pub(super) shareable: bool,
    pub(super) cache: CacheMode,
    /// The image size must be a multiple of this, in bytes.
    pub(super) unit: u64,
}

impl ImageAccess {
    /// Access for a qcow2 image or the backing image of one: the VMM uses the page cache for them.
    pub(super) fn buffered(self) -> ImageAccess {
        let cache = match self.cache {
            CacheMode::WriteThrough => CacheMode::WriteThrough,
            CacheMode::Auto | CacheMode::None | CacheMode::WriteBack => CacheMode::WriteBack,
        };
        ImageAccess { cache, ..self }
    }

    fn sharing(self) -> Sharing {
        match (self.shareable, self.read_only) {
            (true, _) => Sharing::Shareable,
            (false, true) => Sharing::ReadOnly,
            (false, false) => Sharing::Exclusive,
        }
    }
}

/// Opens a regular file or block device as a disk. It stays locked while any copy of the descriptor is open.
pub(super) fn open(found: &PathHandle, access: ImageAccess) -> Result<(OwnedFd, Cache), VolumeFault> {
    if !matches!(found.kind, FileType::RegularFile | FileType::BlockDevice) {
        return Err(VolumeFault::WrongFileType {
            path: found.path.clone(),
            kind: found.kind,
            wanted: "an image file or a block device",
        });
    }
    let mut flags = if access.read_only {
        OFlags::RDONLY
    } else {
        OFlags::RDWR
    };
    if !access.read_only && !access.shareable {
        // O_EXCL fails on a block device that is mounted or claimed. Regular files ignore it.
        flags |= OFlags::EXCL;
    }
    let fd = claim(&found.path, || found.open(flags))?;
    let opened = finish(fd, &found.path, access)?;
    // It may have been removed before it was locked.
    if found.was_removed().map_err(VolumeFault::io(&found.path))? {
        return Err(VolumeFault::io(&found.path)(io::Error::from(Errno::NOENT)));
    }
    Ok(opened)
}

/// Opens an image. The VMM of a VM that has just ended may still have it.
fn claim<T>(path: &Path, open: impl FnMut() -> io::Result<T>) -> Result<T, VolumeFault> {
    let is_busy = |error: &io::Error| error.raw_os_error() == Some(libc::EBUSY);
    when_free(is_busy, open).map_err(|error| match is_busy(&error) {
        true => VolumeFault::InUse(path.to_owned()),
        false => VolumeFault::io(path)(error),
    })
}

/// Locks an open image, checks its size and sets its cache mode.
pub(super) fn finish(fd: OwnedFd, path: &Path, access: ImageAccess) -> Result<(OwnedFd, Cache), VolumeFault> {
    let file = File::from(fd);
    lock_image(&file, path, access.sharing())?;
    let fd = OwnedFd::from(file);
    check_size(&fd, path, access.unit)?;
    let cache = set_cache(&fd, path, access.cache)?;
    Ok((fd, cache))
}

/// Refuses an image that is empty or not a multiple of `unit` bytes.
pub(super) fn check_size(fd: &OwnedFd, path: &Path, unit: u64) -> Result<(), VolumeFault> {
    // The metadata of a block device has no size, but seeking to its end works.
    let bytes = seek(fd, SeekFrom::End(0)).map_err(VolumeFault::io(path))?;
    if bytes == 0 || !bytes.is_multiple_of(unit) {
        return Err(VolumeFault::BadSize {
            path: path.to_owned(),
            bytes,
            unit,
        });
    }
    Ok(())
}

/// Alignment that is safe for direct I/O where the kernel tells none.
const PAGE: u64 = 4096;

/// True if direct I/O can reach the last byte. It always can on a block device, whose status has no size.
fn direct_io_reaches_the_end(fd: &OwnedFd) -> bool {
    let size = fstat(fd).map_or(0, |stat| stat.st_size.unsigned_abs());
    let unit = match statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) if stat.stx_dio_offset_align != 0 => stat.stx_dio_offset_align.into(),
        _ => PAGE,
    };
    size.is_multiple_of(unit)
}

/// Sets the cache mode of the descriptor, and returns the mode that it has.
fn set_cache(fd: &OwnedFd, path: &Path, mode: CacheMode) -> Result<Cache, VolumeFault> {
    let direct = |on| -> io::Result<()> {
        let mut flags = fcntl_getfl(fd)? - OFlags::NONBLOCK;
        flags.set(OFlags::DIRECT, on);
        Ok(fcntl_setfl(fd, flags)?)
    };
    let wanted = match mode {
        CacheMode::Auto => direct_io_reaches_the_end(fd),
        CacheMode::None => true,
        CacheMode::WriteThrough | CacheMode::WriteBack => false,
    };
    match (direct(wanted), mode) {
        (Ok(()), CacheMode::None) => Ok(Cache::None),
        (Ok(()), CacheMode::Auto) if wanted => Ok(Cache::None),
        (Err(_), CacheMode::None) => Err(VolumeFault::NoDirectIo(path.to_owned())),
        (_, CacheMode::Auto) => direct(false)
            .map(|()| Cache::Writethrough)
            .map_err(VolumeFault::io(path)),
        (done, CacheMode::WriteThrough) => done.map(|()| Cache::Writethrough).map_err(VolumeFault::io(path)),
        (done, CacheMode::WriteBack) => done.map(|()| Cache::Writeback).map_err(VolumeFault::io(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_released_soon_is_opened() {
        let path = Path::new("/dev/sdx");
        let mut tries = 0;
        let released = || {
            tries += 1;
            match tries {
                1..=3 => Err(io::Error::from(Errno::BUSY)),
                _ => Ok(()),
            }
        };
        claim(path, released).unwrap();
        assert_eq!(tries, 4);
        let kept = claim(path, || Err::<(), _>(io::Error::from(Errno::BUSY)));
        assert!(matches!(kept, Err(VolumeFault::InUse(_))));
        let mut tries = 0;
        let refused = || {
            tries += 1;
            Err::<(), _>(io::Error::from(Errno::ACCESS))
        };
        assert!(matches!(claim(path, refused), Err(VolumeFault::Io { .. })));
        assert_eq!(tries, 1);
    }

    #[test]
    fn an_image_that_was_removed_before_it_was_locked_is_not_opened() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("disk.img");
        std::fs::write(&path, [0; 512]).unwrap();
        let found = PathHandle::on_host(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let access = ImageAccess {
            read_only: false,
            shareable: false,
            cache: CacheMode::WriteBack,
            unit: 512,
        };
        let error = open(&found, access).unwrap_err().to_string();
        assert!(
            error.ends_with("No such file or directory (os error 2)"),
            "{error}"
        );
    }

    #[test]
    fn where_direct_io_is_impossible_it_is_not_pretended() {
        let path = Path::new("/proc/version");
        let fd = OwnedFd::from(File::open(path).unwrap());
        let error = set_cache(&fd, path, CacheMode::None).unwrap_err().to_string();
        assert_eq!(
            error,
            "Unable to use 'none' cache mode, file system where /proc/version is stored does not support direct I/O"
        );
        assert_eq!(
            set_cache(&fd, path, CacheMode::Auto).unwrap(),
            Cache::Writethrough
        );
        assert!(!fcntl_getfl(&fd).unwrap().contains(OFlags::DIRECT));
    }

    #[test]
    fn an_image_of_unaligned_size_uses_the_page_cache() {
        // tmpfs does direct I/O of whole pages only, and none before Linux 6.6.
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let fd = OwnedFd::from(file.reopen().unwrap());
        if fcntl_setfl(&fd, OFlags::DIRECT).is_err() {
            return;
        }
        for (size, cache) in [(2 * PAGE, Cache::None), (PAGE + 512, Cache::Writethrough)] {
            file.as_file().set_len(size).unwrap();
            assert_eq!(set_cache(&fd, file.path(), CacheMode::Auto).unwrap(), cache);
            let flags = fcntl_getfl(&fd).unwrap();
            assert_eq!(flags.contains(OFlags::DIRECT), cache == Cache::None);
        }
    }
}
