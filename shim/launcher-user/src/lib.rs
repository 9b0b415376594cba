//! Opens files as the user of KubeVirt's launcher, who owns the images on a pod's storage.
//!
//! An NFS server with root_squash treats root as nobody. There root may not open an image that its owner may open.

use std::io;
use std::panic::resume_unwind;
use std::thread;

use rustix::fs::{Gid, Uid};
#[cfg(any(test, feature = "testing"))]
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

/// User and group `qemu` of KubeVirt's launcher.
const LAUNCHER: u32 = 107;

/// User and group of the launcher.
pub fn owner() -> (Uid, Gid) {
    (Uid::from_raw(LAUNCHER), Gid::from_raw(LAUNCHER))
}

/// Repeats a call to the file system as the launcher's user if this one is denied access.
///
/// # Errors
/// The first call's, if this process may not act as another user; else the second call's.
pub fn retry_as_launcher<T: Send>(call: impl Fn() -> io::Result<T> + Sync) -> io::Result<T> {
    match call() {
        Err(denied) if denied.raw_os_error() == Some(libc::EACCES) => {
            as_launcher(&call).unwrap_or(Err(denied))
        }
        other => other,
    }
}

/// Runs a call to the file system as the launcher's user. `None` if this process may not act as another user.
pub fn as_launcher<T: Send>(call: impl FnOnce() -> T + Send) -> Option<T> {
    // The kernel keeps this user for each thread. A thread that ends has nothing to restore.
    let run = || become_launcher().then(call);
    thread::scope(|scope| {
        let thread = thread::Builder::new().spawn_scoped(scope, run).ok()?;
        thread.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Lets this thread access files as the launcher's user. False if the kernel does not allow it.
fn become_launcher() -> bool {
    // SAFETY: the calls change the credentials of this thread, and no memory. Other threads keep theirs. The first
    // needs CAP_SETGID, which the second leaves.
    unsafe {
        libc::setfsgid(LAUNCHER);
        libc::setfsuid(LAUNCHER);
    }
    // Neither call reports an error. With an ID that does not exist they change nothing, and return the present one.
    // SAFETY: as above.
    let present = unsafe { [libc::setfsgid(u32::MAX), libc::setfsuid(u32::MAX)] };
    present.iter().all(|id| u32::try_from(*id) == Ok(LAUNCHER))
}

/// Runs a test in a thread that lacks `rights`. Panics if the test does.
#[cfg(any(test, feature = "testing"))]
pub fn without(rights: CapabilitySet, run: impl FnOnce() + Send) {
    let run = || {
        let mut all = capabilities(None).unwrap();
        all.effective -= rights;
        all.permitted -= rights;
        all.inheritable -= rights;
        set_capabilities(None, all).unwrap();
        run();
    };
    thread::scope(|scope| scope.spawn(run).join()).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_denied_call_is_repeated_and_not_by_everybody() {
        let calls = std::sync::atomic::AtomicU32::new(0);
        let fail = |code| {
            let failed: io::Result<()> = retry_as_launcher(|| {
                calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                Err(io::Error::from_raw_os_error(code))
            });
            assert_eq!(failed.unwrap_err().raw_os_error(), Some(code));
            calls.swap(0, std::sync::atomic::Ordering::Relaxed)
        };
        assert_eq!(fail(libc::ENOENT), 1);
        assert_eq!(
            fail(libc::EACCES),
            1 + u32::from(rustix::process::geteuid().is_root())
        );
        without(CapabilitySet::SETUID | CapabilitySet::SETGID, || {
            assert_eq!(fail(libc::EACCES), 1);
        });
    }
}
