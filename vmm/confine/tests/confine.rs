//! A process drops its privileges, with any root directory.

use std::fs;
use std::io;
use std::path::Path;

use husk_confine::{Credentials, confine};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
};
use rustix::process::{
    Pid, Signal, WaitOptions, chdir, chroot, getgid, getuid, parent_process_death_signal, waitpid,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};

const CREDENTIALS: Credentials = Credentials { uid: 4242, gid: 4243 };

/// Runs `prepare` and then [`confine`] in a child process, and checks there that nothing but an empty directory is
/// left.
fn confined_child(prepare: impl FnOnce()) {
    // SAFETY: the child has one thread; it only needs the allocator, which the C library keeps usable after fork.
    let forked = unsafe { libc::fork() };
    assert!(forked >= 0, "{}", io::Error::last_os_error());
    let Some(child) = Pid::from_raw(forked) else {
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            // SAFETY: without FILES, the descriptors stay shared.
            unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.expect("a mount namespace");
            prepare();
            confine(CREDENTIALS).expect("confined");
            check();
        }));
        // SAFETY: ends the child without running the exit handlers of the test harness.
        unsafe { libc::_exit(checked.is_err().into()) }
    };
    let (_, status) = waitpid(Some(child), WaitOptions::empty())
        .expect("the child")
        .expect("its end");
    assert_eq!(status.exit_status(), Some(0), "{status:?}");
}

fn check() {
    for path in ["/", ".", "..", "/../.."] {
        let entries = fs::read_dir(path).expect(path).count();
        assert_eq!(entries, 0, "{path}");
    }
    let read_only = fs::create_dir("/x").unwrap_err();
    assert_eq!(read_only.raw_os_error(), Some(libc::EROFS));
    assert_eq!((getuid().as_raw(), getgid().as_raw()), (4242, 4243));
    assert_eq!(parent_process_death_signal(), Ok(Some(Signal::KILL)));
    assert_eq!(chroot("."), Err(Errno::PERM));
    assert_eq!(unmount("/", UnmountFlags::empty()), Err(Errno::PERM));
    assert_eq!(
        mount("proc", "/", "proc", MountFlags::empty(), None),
        Err(Errno::PERM)
    );
    for capability in 0..41 {
        // SAFETY: PR_CAPBSET_READ takes a number and touches no memory.
        let bounding = unsafe { libc::prctl(libc::PR_CAPBSET_READ, capability, 0, 0, 0) };
        assert_eq!(
            bounding,
            0,
            "capability {capability}: {}",
            io::Error::last_os_error()
        );
    }
}

#[test]
#[ignore = "needs root"]
fn a_root_that_can_be_pivoted_is_replaced() {
    confined_child(|| {});
}

/// pivot_root(2) fails with EINVAL on rootfs, which has no parent mount. It fails in the same way, and needs no machine
/// booted from an initramfs, where the parent of the root mount is shared.
#[test]
#[ignore = "needs root"]
fn a_root_that_cannot_be_pivoted_is_covered() {
    let root = tempfile::tempdir().expect("a directory");
    for name in ["tmp", "etc"] {
        fs::create_dir(root.path().join(name)).expect("a directory");
    }
    confined_child(|| {
        // Private first, so that nothing propagates to the mount namespace of the test.
        for propagation in [MountPropagationFlags::PRIVATE, MountPropagationFlags::SHARED] {
            mount_change("/", MountPropagationFlags::REC | propagation).expect("a propagation type");
        }
        mount_bind(root.path(), root.path()).expect("a root mount");
        chdir(root.path()).expect("enter it");
        chroot(".").expect("make it the root");
        assert!(Path::new("/etc").is_dir());
    });
}
