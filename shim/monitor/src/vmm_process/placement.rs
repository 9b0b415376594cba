//! The cgroup, OOM score and PID namespace of a VMM.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// The cgroup and OOM score of a VMM's process.
#[derive(Debug, Clone, Default)]
pub struct VmmPlacement {
    /// Directory of its cgroup (version 2). Without one, the VMM stays in the caller's.
    pub cgroup: Option<PathBuf>,
    /// Its oom_score_adj. Without one, the VMM has the caller's.
    pub oom_score_adj: Option<i32>,
}

/// The open cgroup.procs of a cgroup, to be written between fork and exec.
#[derive(Debug)]
pub(super) struct CgroupProcs(Option<OwnedFd>);

impl VmmPlacement {
    pub(super) fn procs_file(&self) -> io::Result<CgroupProcs> {
        let Some(cgroup) = &self.cgroup else {
            return Ok(CgroupProcs(None));
        };
        let procs = File::options().write(true).open(cgroup.join("cgroup.procs"))?;
        Ok(CgroupProcs(Some(procs.into())))
    }

    /// Sets the oom_score_adj of the VMM's process.
    pub(super) fn set_oom_score_adj(&self, pid: Option<u32>) -> io::Result<()> {
        match (self.oom_score_adj, pid) {
            (Some(value), Some(pid)) => fs::write(format!("/proc/{pid}/oom_score_adj"), value.to_string()),
            _ => Ok(()),
        }
    }
}

impl CgroupProcs {
    /// Moves the calling process to the cgroup. Makes one system call and nothing else.
    pub(super) fn enter(&self) -> io::Result<()> {
        if let Some(procs) = &self.0 {
            rustix::io::write(procs, b"0")?;
        }
        Ok(())
    }
}

/// Calls `spawn` so that the child is the first process of a new PID namespace. If that is not permitted, the child is
/// in the caller's namespace.
///
/// The namespace is created for children of the calling thread. Afterwards its children are in its own namespace again.
pub(super) fn in_new_pid_namespace<T>(spawn: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Ok(own) = File::open("/proc/self/ns/pid") else {
        return spawn();
    };
    // SAFETY: without FILES, the descriptors stay shared.
    if unsafe { unshare_unsafe(UnshareFlags::NEWPID) }.is_err() {
        return spawn();
    }
    let spawned = spawn();
    // If this fails, the thread can start no other thread.
    move_into_link_name_space(own.as_fd(), Some(LinkNameSpaceType::ProcessID))?;
    spawned
}
