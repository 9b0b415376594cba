//! The VMM drops its privileges, with any root directory.

use std::fs;
use std::io;
use std::path::Path;

use husk_vmm::confine::{Credentials, confine};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, chdir, chroot, fork, getgid, getuid};

const CREDENTIALS: Credentials = Credentials { uid: 4242, gid: 4243 };

/// Runs `prepare` and then [`confine`] in a child process, and checks there that nothing but an empty directory is
/// left.
fn confined_child(prepare: impl FnOnce()) {
    // SAFETY: the child has one thread; it only needs the allocator, which the C library keeps usable after fork.
    match unsafe { fork() }.expect("fork") {
        ForkResult::Child => {
            let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace");
                prepare();
                confine(CREDENTIALS).expect("confined");
                check();
            }));
            // SAFETY: ends the child without running the exit handlers of the test harness.
            unsafe { libc::_exit(checked.is_err().into()) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
        }
    }
}

fn check() {
    for path in ["/", ".", "..", "/../.."] {
        let entries = fs::read_dir(path).expect(path).count();
        assert_eq!(entries, 0, "{path}");
    }
    let read_only = fs::create_dir("/x").unwrap_err();
    assert_eq!(read_only.raw_os_error(), Some(libc::EROFS));
    assert_eq!((getuid().as_raw(), getgid().as_raw()), (4242, 4243));
    let death_signal = nix::sys::prctl::get_pdeathsig();
    assert_eq!(death_signal, Ok(Some(nix::sys::signal::Signal::SIGKILL)));
    assert_eq!(chroot("."), Err(nix::Error::EPERM));
    let none: Option<&str> = None;
    assert_eq!(nix::mount::umount("/"), Err(nix::Error::EPERM));
    assert_eq!(
        mount(none, "/", Some("proc"), MsFlags::empty(), none),
        Err(nix::Error::EPERM)
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
        let none: Option<&str> = None;
        // Private first, so that nothing propagates to the mount namespace of the test.
        for propagation in [MsFlags::MS_PRIVATE, MsFlags::MS_SHARED] {
            mount(none, "/", none, MsFlags::MS_REC | propagation, none).expect("a propagation type");
        }
        mount(Some(root.path()), root.path(), none, MsFlags::MS_BIND, none).expect("a root mount");
        chdir(root.path()).expect("enter it");
        chroot(".").expect("make it the root");
        assert!(Path::new("/etc").is_dir());
    });
}
