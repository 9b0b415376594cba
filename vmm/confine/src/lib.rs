//! Drops the privileges that a process does not need, before it reads any input: the VMM, and the one that converts
//! images.
//!
//! As root: mount, network, IPC and UTS namespaces, an empty read-only root directory, another user id, no
//! capabilities. As an ordinary user: the same inside a user namespace, if the host allows one.

use std::fs;
use std::io;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_change, mount_move, unmount,
};
use rustix::process::{
    DumpableBehavior, Gid, Signal, Uid, chdir, chroot, geteuid, getgid, getuid, pivot_root,
    set_dumpable_behavior, set_parent_process_death_signal,
};
use rustix::thread::{
    UnshareFlags, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid, unshare_unsafe,
};

/// User and group that the process switches to when it is started as root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// User id, not 0.
    pub uid: u32,
    /// Group id, not 0.
    pub gid: u32,
}

/// A privilege could not be dropped.
#[derive(Debug, thiserror::Error)]
#[error("cannot confine the process ({step}): {source}")]
pub struct ConfineError {
    step: &'static str,
    source: io::Error,
}

fn step<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> ConfineError {
    move |e| ConfineError {
        step,
        source: e.into(),
    }
}

/// Candidate mount points for the empty root. One of them exists on every host.
const STAGES: [&str; 4] = ["/tmp", "/run", "/proc", "/dev"];

/// Confines the calling process, which must have one thread. A root process switches to `credentials`. The kernel kills
/// the process when the parent's thread that started it ends.
///
/// # Errors
/// As root every step must succeed. If the host forbids an ordinary user to create user namespaces, the process stays
/// that user, without the ability to gain privileges, and logs a warning.
pub fn confine(credentials: Credentials) -> Result<(), ConfineError> {
    let namespaces = UnshareFlags::NEWNS | UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    if geteuid().is_root() {
        unshare(namespaces).map_err(step("namespaces"))?;
        empty_root()?;
        drop_bounding_set()?;
        let (uid, gid) = (Uid::from_raw(credentials.uid), Gid::from_raw(credentials.gid));
        // The ids of the only thread are those of the process.
        set_thread_groups(&[]).map_err(step("groups"))?;
        set_thread_res_gid(gid, gid, gid).map_err(step("gid"))?;
        set_thread_res_uid(uid, uid, uid).map_err(step("uid"))?;
    } else if let Err(error) = as_user(namespaces) {
        tracing::warn!(%error, "no user namespace: the process shares the host's namespaces");
    }
    drop_capabilities()?;
    set_no_new_privs(true).map_err(step("no_new_privs"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(step("dumpable"))?;
    // The kernel clears the signal that the parent set when the process changes its user id, so set it again last. If
    // the parent died before this line, its end of the process's socket or pipe is closed, which stops the process.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(step("parent death signal"))
}

fn unshare(namespaces: UnshareFlags) -> Result<(), Errno> {
    // SAFETY: without FILES, the descriptors stay shared.
    unsafe { unshare_unsafe(namespaces) }
}

fn as_user(namespaces: UnshareFlags) -> Result<(), ConfineError> {
    let (uid, gid) = (getuid(), getgid());
    unshare(UnshareFlags::NEWUSER | namespaces).map_err(step("user namespace"))?;
    let write = |file: &str, text: String| {
        fs::write(Path::new("/proc/self").join(file), text).map_err(step("user namespace maps"))
    };
    write("setgroups", "deny".into())?;
    write("uid_map", format!("{uid} {uid} 1"))?;
    write("gid_map", format!("{gid} {gid} 1"))?;
    empty_root()?;
    drop_bounding_set()
}

/// Changes to an empty, read-only root directory.
fn empty_root() -> Result<(), ConfineError> {
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .map_err(step("private mounts"))?;
    let stage = STAGES.into_iter().find(|s| Path::new(s).is_dir()).unwrap_or("/");
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    let data = c"size=4k,nr_inodes=1,mode=0555";
    mount("none", stage, "tmpfs", flags, data).map_err(step("empty root"))?;
    chdir(stage).map_err(step("empty root"))?;
    match pivot_root(".", ".") {
        // The old root is now stacked on the root directory of the new one.
        Ok(()) => unmount(".", UnmountFlags::DETACH).map_err(step("detach old root"))?,
        Err(Errno::INVAL) => cover_root()?,
        Err(error) => return Err(step("change root")(error)),
    }
    chroot(".")
        .and_then(|()| chdir("/"))
        .map_err(step("enter new root"))
}

/// Moves the mount at the working directory over the root directory, as switch_root(8) does.
///
/// pivot_root(2) fails with EINVAL if the root is rootfs (the initramfs), which has no parent mount and cannot be
/// unmounted. The old root then stays in the mount namespace, beneath the new one. A path walk does not get there: `..`
/// ends at the root directory, and the steps that could uncover it (chroot, umount, a further namespace) take
/// capabilities that are dropped next and system calls that the seccomp filters forbid.
fn cover_root() -> Result<(), ConfineError> {
    mount_move(".", "/").map_err(step("cover root"))?;
    // Absolute paths still lead to the old root. Its other mounts are detached, so that nothing but rootfs stays. It is
    // a second line of defence only: without /proc, or in a user namespace, where they are locked, they stay.
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for point in mounts.lines().rev().filter_map(|line| line.split(' ').nth(4)) {
        if point != "/" {
            let _ = unmount(point, UnmountFlags::DETACH);
        }
    }
    Ok(())
}

fn drop_bounding_set() -> Result<(), ConfineError> {
    for capability in 0..64u64 {
        // SAFETY: PR_CAPBSET_DROP takes a number and touches no memory.
        let status = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        if status != 0 {
            let error = io::Error::last_os_error();
            // The kernel returns EINVAL for the first number beyond its last capability.
            return if error.raw_os_error() == Some(libc::EINVAL) {
                Ok(())
            } else {
                Err(step("bounding set")(error))
            };
        }
    }
    Ok(())
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

fn drop_capabilities() -> Result<(), ConfineError> {
    const VERSION_3: u32 = 0x2008_0522;
    let header = CapHeader {
        version: VERSION_3,
        pid: 0,
    };
    let none = [[0u32; 3]; 2];
    // SAFETY: header and data have the layout capset(2) documents for version 3 and outlive the call.
    let status = unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) };
    if status == 0 {
        Ok(())
    } else {
        Err(step("capabilities")(io::Error::last_os_error()))
    }
}
