//! Open-file-description locks on whole files. The kernel drops them when the process ends, and testing a lock does not
//! take it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

fn whole_file(kind: libc::c_int) -> libc::flock {
    // SAFETY: flock consists of integers, for which zeroes are valid: offset 0, length 0 (to the end), pid 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock
}

/// Creates `path` if it is missing and waits for the exclusive lock.
pub fn exclusive(path: &Path) -> io::Result<File> {
    let file = open(path)?;
    loop {
        match command(&file, libc::F_OFD_SETLKW, &mut whole_file(libc::F_WRLCK)) {
            Ok(()) => return Ok(file),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// True if a process holds the lock on `file`. This includes the calling process through another open file.
pub fn is_held(file: &File) -> io::Result<bool> {
    let mut lock = whole_file(libc::F_WRLCK);
    command(file, libc::F_OFD_GETLK, &mut lock)?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Runs one of the commands of fcntl(2) for OFD locks.
fn command(file: &File, command: libc::c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the kernel reads and writes one flock, and the descriptor is open.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut *lock) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn open(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(flags)
        .open(path)
}
