//! Locks of open images, by the protocol of QEMU (`block/file-posix.c`), so that QEMU and Husk see each other.
//!
//! A user of an image locks one byte for reading for each permission that it has, and one for each that it denies
//! others. Then it tests the opposite bytes: a lock there is of one that denies what it has, or has what it denies.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl};
use tracing::warn;

use super::error::VolumeFault;

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

/// Takes an OFD lock on an open image, which lasts until its last descriptor is closed: it goes with the descriptor to
/// the VMM. Waits for half a second at most.
///
/// # Errors
/// A VM or another program has locked it.
pub fn lock_image(file: &File, path: &Path, sharing: Sharing) -> Result<(), VolumeFault> {
    let Err(error) = when_free(is_held, || try_lock(file, sharing)) else {
        return Ok(());
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

/// Repeats `take` while it fails because another has the image, for half a second at most.
pub(super) fn when_free<T>(
    is_held: impl Fn(&io::Error) -> bool,
    mut take: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let limit = Instant::now() + LOCK_TIMEOUT;
    loop {
        match take() {
            Err(error) if is_held(&error) && Instant::now() < limit => {
                std::thread::sleep(Duration::from_millis(10));
            }
            done => return done,
        }
    }
}

/// True if a VM or another program has locked a file.
pub fn is_locked(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| test_lock(&file, 0, 0).is_err_and(|error| is_held(&error)))
}

/// True if the error of a lock says that another has it.
fn is_held(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

/// Offset of the bytes of the permissions that a user has.
const HAS: i64 = 100;
/// Offset of the bytes of the permissions that a user denies others.
const DENIES: i64 = 200;
/// `BLK_PERM_CONSISTENT_READ`.
const READ: i64 = 0;
/// `BLK_PERM_WRITE`.
const WRITE: i64 = 1;
/// `BLK_PERM_RESIZE`.
const RESIZE: i64 = 3;

fn try_lock(file: &File, sharing: Sharing) -> io::Result<()> {
    let (has, denies): (&[i64], &[i64]) = match sharing {
        // A lock for writing needs no test, and includes the bytes of all.
        Sharing::Exclusive => return set_lock(file, libc::F_WRLCK, 0, 0),
        Sharing::ReadOnly => (&[READ], &[WRITE, RESIZE]),
        Sharing::Shareable if fcntl_getfl(file)?.contains(OFlags::RDWR) => (&[READ, WRITE], &[]),
        Sharing::Shareable => (&[READ], &[]),
    };
    let done = lock_bytes(file, has, denies);
    if done.is_err() {
        let _ = set_lock(file, libc::F_UNLCK, 0, 0);
    }
    done
}

/// Locks, then tests: of two users in conflict at least one sees the other.
fn lock_bytes(file: &File, has: &[i64], denies: &[i64]) -> io::Result<()> {
    let bytes =
        |(at, permissions): (i64, &[i64])| permissions.iter().map(move |bit| at + bit).collect::<Vec<_>>();
    for byte in [(HAS, has), (DENIES, denies)].into_iter().flat_map(bytes) {
        set_lock(file, libc::F_RDLCK, byte, 1)?;
    }
    for byte in [(DENIES, has), (HAS, denies)].into_iter().flat_map(bytes) {
        test_lock(file, byte, 1)?;
    }
    Ok(())
}

/// Takes an OFD lock of `length` bytes from `start`, or of all from there if it is 0, if it is free.
fn set_lock(file: &File, kind: i32, start: i64, length: i64) -> io::Result<()> {
    command(file, libc::F_OFD_SETLK, kind, start, length).map(drop)
}

/// Fails if another has a lock of these bytes.
fn test_lock(file: &File, start: i64, length: i64) -> io::Result<()> {
    let found = command(file, libc::F_OFD_GETLK, libc::F_WRLCK, start, length)?;
    match i32::from(found.l_type) {
        libc::F_UNLCK => Ok(()),
        _ => Err(io::Error::from_raw_os_error(libc::EAGAIN)),
    }
}

/// Runs one of the commands of fcntl(2) for OFD locks.
fn command(file: &File, command: i32, kind: i32, start: i64, length: i64) -> io::Result<libc::flock> {
    // SAFETY: flock consists of integers, for which zeroes are valid: offsets from the file's begin, pid 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_start = start;
    lock.l_len = length;
    // SAFETY: the kernel reads and writes one flock, and the descriptor is open.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Image {
        path: std::path::PathBuf,
        _home: tempfile::TempDir,
    }

    impl Image {
        fn new() -> Image {
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("disk.img");
            std::fs::write(&path, [0; 512]).unwrap();
            Image { path, _home: home }
        }

        fn writer(&self) -> File {
            File::options().read(true).write(true).open(&self.path).unwrap()
        }

        fn reader(&self) -> File {
            File::open(&self.path).unwrap()
        }

        fn lock(&self, file: File, sharing: Sharing) -> Option<File> {
            match lock_image(&file, &self.path, sharing) {
                Ok(()) => Some(file),
                Err(VolumeFault::InUse(_)) => None,
                Err(error) => panic!("{error}"),
            }
        }

        /// Opens the image as QEMU does, with bytes of [`HAS`] and [`DENIES`].
        fn qemu(&self, has: &[i64], denies: &[i64]) -> Option<File> {
            let file = self.writer();
            lock_bytes(&file, has, denies).is_ok().then_some(file)
        }
    }

    #[test]
    fn readers_and_shareable_writers_exclude_each_other() {
        let image = Image::new();
        let first = image.lock(image.writer(), Sharing::Shareable).unwrap();
        let second = image.lock(image.writer(), Sharing::Shareable).unwrap();
        let read_only = image.lock(image.reader(), Sharing::Shareable).unwrap();
        assert!(is_locked(&image.path));
        for refused in [Sharing::ReadOnly, Sharing::Exclusive] {
            assert!(image.lock(image.writer(), refused).is_none());
        }
        drop((first, second));
        let copier = image.lock(image.reader(), Sharing::ReadOnly).unwrap();
        let another = image.lock(image.reader(), Sharing::ReadOnly).unwrap();
        assert!(image.lock(image.writer(), Sharing::Shareable).is_none());
        drop((copier, another, read_only));
        assert!(!is_locked(&image.path));
        image.lock(image.writer(), Sharing::Exclusive).unwrap();
    }

    #[test]
    fn a_refused_lock_leaves_nothing_locked() {
        let image = Image::new();
        let writer = image.lock(image.writer(), Sharing::Shareable).unwrap();
        let refused = image.reader();
        lock_image(&refused, &image.path, Sharing::ReadOnly).unwrap_err();
        drop(writer);
        assert!(!is_locked(&image.path));
        drop(refused);
    }

    /// QEMU locks these bytes for a disk: a writer allows others to read, and with `share-rw=on` also to write.
    #[test]
    fn qemu_and_husk_exclude_each_other_and_share_as_qemu_does() {
        let image = Image::new();
        let writer: (&[i64], &[i64]) = (&[READ, WRITE], &[WRITE]);
        let shared_writer: (&[i64], &[i64]) = (&[READ, WRITE], &[]);
        let reader: (&[i64], &[i64]) = (&[READ], &[WRITE]);
        let cases = [
            (writer, Sharing::Exclusive, false),
            (writer, Sharing::ReadOnly, false),
            (writer, Sharing::Shareable, false),
            (shared_writer, Sharing::Exclusive, false),
            (shared_writer, Sharing::ReadOnly, false),
            (shared_writer, Sharing::Shareable, true),
            (reader, Sharing::Exclusive, false),
            (reader, Sharing::ReadOnly, true),
            (reader, Sharing::Shareable, false),
        ];
        for ((has, denies), sharing, together) in cases {
            let qemu = image.qemu(has, denies).unwrap();
            let husk = image.lock(image.writer(), sharing);
            assert_eq!(husk.is_some(), together, "QEMU {has:?}, then {sharing:?}");
            drop((qemu, husk));
            let husk = image.lock(image.writer(), sharing).unwrap();
            let qemu = image.qemu(has, denies);
            assert_eq!(qemu.is_some(), together, "{sharing:?}, then QEMU {has:?}");
            drop((qemu, husk));
        }
    }
}
