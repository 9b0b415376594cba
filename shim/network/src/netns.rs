//! Network namespaces. A thread that enters one ends with its work, so no thread pool runs anything else in the
//! namespace.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use super::nsfs;

/// Namespace of the thread that opens it.
const OWN: &str = "/proc/thread-self/ns/net";

/// An open network namespace, which exists at least as long as this.
#[derive(Debug, Clone)]
pub struct Netns {
    file: Arc<File>,
}

impl Netns {
    /// Opens the namespace at a path such as `/var/run/netns/NAME` or `/proc/PID/ns/net`.
    pub fn open(path: &Path) -> io::Result<Netns> {
        // Opening another kind of file, such as a FIFO, must not block.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        match nsfs::kind(&file) {
            Ok(libc::CLONE_NEWNET) => Ok(Netns { file: Arc::new(file) }),
            _ => Err(io::Error::other("it is not a network namespace")),
        }
    }

    /// Namespace of the calling thread.
    pub fn own() -> io::Result<Netns> {
        Netns::open(Path::new(OWN))
    }

    pub fn from_fd(fd: OwnedFd) -> Netns {
        Netns {
            file: Arc::new(fd.into()),
        }
    }

    /// Creates a namespace without a name. Its loopback device is down.
    pub fn create() -> io::Result<Netns> {
        on_thread("netns", || {
            // SAFETY: without FILES, the descriptors stay shared.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            Netns::own()
        })?
    }

    /// Runs `work` in the namespace on a new thread, and waits for it.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_thread("netns", || {
            move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(work())
        })?
    }

    /// Number that identifies the namespace: its cookie, which the kernel never reuses. Before Linux 5.14 the inode
    /// number, which the kernel may reuse.
    pub fn id(&self) -> io::Result<u64> {
        match self.run(cookie)? {
            Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(self.file.metadata()?.ino()),
            cookie => cookie,
        }
    }
}

/// Cookie of the calling thread's namespace.
fn cookie() -> io::Result<u64> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut cookie = 0u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which is the size of the value.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(cookie)
}

impl AsFd for Netns {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn on_thread<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn_scoped(scope, work)?;
        thread
            .join()
            .map_err(|_| io::Error::other("the thread in the network namespace panicked"))
    })
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, Mode, mkfifoat};

    use super::*;

    #[test]
    fn other_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        mkfifoat(CWD, &fifo, Mode::RUSR).unwrap();
        for path in [&fifo, Path::new("/proc/self/ns/mnt"), Path::new("/dev/null")] {
            let error = Netns::open(path).unwrap_err();
            assert_eq!(
                error.to_string(),
                "it is not a network namespace",
                "{}",
                path.display()
            );
        }
    }

    #[test]
    #[ignore = "needs root"]
    fn namespaces_have_different_ids() {
        let (one, other) = (Netns::create().unwrap(), Netns::create().unwrap());
        assert_ne!(one.id().unwrap(), other.id().unwrap());
        let inside = other.run(|| Netns::own().unwrap().id().unwrap()).unwrap();
        assert_eq!(inside, other.id().unwrap());
    }
}
