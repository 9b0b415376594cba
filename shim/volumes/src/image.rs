//! Opens images and block devices.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use husk_proto::vmm::v1::disk::Cache;
use husk_vmi::CacheMode;
use rustix::fs::{
    AtFlags, FileType, OFlags, SeekFrom, StatxFlags, fcntl_getfl, fcntl_setfl, fstat, seek, statx,
};
use rustix::io::Errno;
use tracing::warn;

use super::error::VolumeFault;
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
    let fd = match found.open(flags) {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
            return Err(VolumeFault::InUse(found.path.clone()));
        }
        other => other.map_err(VolumeFault::io(&found.path))?,
    };
    let opened = finish(fd, &found.path, access)?;
    // It may have been removed before it was locked.
    if found.was_removed().map_err(VolumeFault::io(&found.path))? {
        return Err(VolumeFault::io(&found.path)(io::Error::from(Errno::NOENT)));
    }
    Ok(opened)
}

/// Locks an open image, checks its size and sets its cache mode.
pub(super) fn finish(fd: OwnedFd, path: &Path, access: ImageAccess) -> Result<(OwnedFd, Cache), VolumeFault> {
    let file = File::from(fd);
    lock(&file, path, access)?;
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

/// Time to wait for a lock. The images of an ended VM were measured to stay locked for up to 29 ms after `husk run`
/// returned.
const LOCK_TIMEOUT: Duration = Duration::from_millis(500);

/// The uses of an image that its lock lets others have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Nobody.
    Exclusive,
    /// Readers.
    ReadOnly,
    /// Readers and writers that allow others to write.
    Shareable,
}

/// Takes an OFD lock, which goes with the descriptor to the VMM. QEMU locks images with the same kind of lock in the
/// same range.
fn lock(file: &File, path: &Path, access: ImageAccess) -> Result<(), VolumeFault> {
    let sharing = match (access.shareable, access.read_only) {
        (true, _) => Sharing::Shareable,
        (false, true) => Sharing::ReadOnly,
        (false, false) => Sharing::Exclusive,
    };
    lock_image(file, path, sharing)
}

/// Locks an open image against other uses until its last descriptor is closed. Waits for half a second at most.
///
/// # Errors
/// A VM or another program has locked it.
pub fn lock_image(file: &File, path: &Path, sharing: Sharing) -> Result<(), VolumeFault> {
    let limit = Instant::now() + LOCK_TIMEOUT;
    let error = loop {
        let Err(error) = try_lock(file, sharing) else {
            return Ok(());
        };
        if !is_held(&error) || Instant::now() >= limit {
            break error;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    match error.raw_os_error() {
        _ if is_held(&error) => Err(VolumeFault::InUse(path.to_owned())),
        Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS) => {
            warn!(path = %path.display(), %error, "the file system has no locks: two VMs could open this image");
            Ok(())
        }
        _ => Err(VolumeFault::io(path)(error)),
    }
}

/// True if a VM or another program has locked a file. Asks for a lock for writing, and gives it back.
pub fn is_locked(path: &Path) -> bool {
    let Ok(file) = File::options().read(true).write(true).open(path) else {
        return false;
    };
    try_lock(&file, Sharing::Exclusive).is_err_and(|error| is_held(&error))
}

/// True if the error of a lock says that another has it.
fn is_held(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

/// Offset of the bytes of which each shareable writer locks one for writing, which no image reaches. Readers, which
/// lock the whole file, conflict with that, and other shareable writers do not.
const WRITERS_AT: i64 = 1 << 62;
/// Limit for shareable writers.
const WRITERS: i64 = 256;

fn try_lock(file: &File, sharing: Sharing) -> io::Result<()> {
    match sharing {
        Sharing::Exclusive => set_lock(file, libc::F_WRLCK, 0, 0),
        Sharing::ReadOnly => set_lock(file, libc::F_RDLCK, 0, 0),
        Sharing::Shareable => {
            set_lock(file, libc::F_RDLCK, 0, WRITERS_AT)?;
            if !fcntl_getfl(file)?.contains(OFlags::RDWR) {
                return Ok(());
            }
            let mut result = Ok(());
            for writer in 0..WRITERS {
                result = set_lock(file, libc::F_WRLCK, WRITERS_AT + writer, 1);
                if !result.as_ref().is_err_and(is_held) {
                    break;
                }
            }
            result
        }
    }
}

/// Takes an OFD lock of `length` bytes from `start`, or of all from there if it is 0, if it is free.
fn set_lock(file: &File, kind: i32, start: i64, length: i64) -> io::Result<()> {
    // SAFETY: flock consists of integers, for which zeroes are valid: offsets from the file's begin, pid 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_start = start;
    lock.l_len = length;
    // SAFETY: the kernel reads one flock, and the descriptor is open.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
    if done < 0 {
        return Err(io::Error::last_os_error());
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
    fn readers_and_shareable_writers_exclude_each_other() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("disk.img");
        std::fs::write(&path, [0; 512]).unwrap();
        let writer = || File::options().read(true).write(true).open(&path).unwrap();
        let reader = || File::open(&path).unwrap();
        let lock = |file: File, sharing| lock_image(&file, &path, sharing).map(|()| file);

        let first = lock(writer(), Sharing::Shareable).unwrap();
        let second = lock(writer(), Sharing::Shareable).unwrap();
        let read_only = lock(reader(), Sharing::Shareable).unwrap();
        assert!(is_locked(&path));
        for refused in [Sharing::ReadOnly, Sharing::Exclusive] {
            assert!(matches!(lock(writer(), refused), Err(VolumeFault::InUse(_))));
        }
        drop((first, second));
        let copier = lock(reader(), Sharing::ReadOnly).unwrap();
        let another = lock(reader(), Sharing::ReadOnly).unwrap();
        assert!(matches!(
            lock(writer(), Sharing::Shareable),
            Err(VolumeFault::InUse(_))
        ));
        drop((copier, another, read_only));
        assert!(!is_locked(&path));
        lock(writer(), Sharing::Exclusive).unwrap();
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
    fn an_image_whose_end_direct_io_does_not_reach_does_without() {
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
