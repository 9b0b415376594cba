//! Where a VMM's process is: its cgroup and its process ids.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use nix::sched::{CloneFlags, setns, unshare};

/// Where a VMM's process is.
#[derive(Debug, Clone, Default)]
pub struct CgroupPlacement {
    /// The directory of its cgroup (version 2); none for the caller's.
    pub cgroup: Option<PathBuf>,
}

/// The file that takes processes into a cgroup, to be written between fork and exec.
#[derive(Debug)]
pub(super) struct CgroupProcs(Option<OwnedFd>);

impl CgroupPlacement {
    pub(super) fn entrance(&self) -> io::Result<CgroupProcs> {
        let Some(cgroup) = &self.cgroup else {
            return Ok(CgroupProcs(None));
        };
        let procs = File::options().write(true).open(cgroup.join("cgroup.procs"))?;
        Ok(CgroupProcs(Some(procs.into())))
    }
}

impl CgroupProcs {
    /// Moves the calling process; one system call and nothing else.
    pub(super) fn enter(&self) -> io::Result<()> {
        if let Some(procs) = &self.0 {
            rustix::io::write(procs, b"0")?;
        }
        Ok(())
    }
}

/// Does `spawn` so that the child is the first process of a PID namespace, and sees no other; as it is where that is not
/// allowed.
///
/// A namespace is made for the children of the calling thread, which gets its own back.
pub(super) fn in_new_pid_namespace<T>(spawn: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Ok(own) = File::open("/proc/self/ns/pid") else {
        return spawn();
    };
    if unshare(CloneFlags::CLONE_NEWPID).is_err() {
        return spawn();
    }
    let spawned = spawn();
    // Where this failed, a thread could not start another one any more.
    setns(own.as_fd(), CloneFlags::CLONE_NEWPID)?;
    spawned
}
