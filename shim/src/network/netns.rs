//! Network namespaces, each entered by threads made for it: a thread that has entered one ends with its work, so that
//! no pool ever runs anything else in it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A hold on a network namespace, which lives at least as long.
#[derive(Debug, Clone)]
pub struct Netns {
    file: Arc<File>,
}

impl Netns {
    /// Opens what a container runtime names, such as `/var/run/netns/NAME` or `/proc/PID/ns/net`.
    pub fn open(path: &Path) -> io::Result<Netns> {
        Ok(Netns {
            file: Arc::new(File::open(path)?),
        })
    }

    /// Takes one that is open.
    pub fn from_fd(fd: OwnedFd) -> Netns {
        Netns {
            file: Arc::new(fd.into()),
        }
    }

    /// Makes a new one, without a name; it has a loopback device, which is down.
    pub fn create() -> io::Result<Netns> {
        on_thread("netns", || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)?;
            Netns::open(Path::new("/proc/thread-self/ns/net"))
        })?
    }

    /// Does `work` in it, on a thread of its own, and waits for it.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_thread("netns", || {
            move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))?;
            Ok(work())
        })?
    }

    /// What tells it from all others that exist.
    pub fn inode(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.ino())
    }
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
