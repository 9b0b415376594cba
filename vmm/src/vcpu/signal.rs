//! Kicks a thread out of KVM_RUN: sets `immediate_exit`, then sends a signal whose handler does nothing. The flag also
//! covers a kick that comes just before KVM_RUN.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use kvm_ioctls::VcpuFd;

extern "C" fn ignore(_: libc::c_int) {}

/// Installs the handler of the kick signal, without SA_RESTART: KVM_RUN returns EINTR.
pub fn install() -> io::Result<()> {
    // SAFETY: an all-zero sigaction is valid; the handler is async-signal-safe since it does nothing.
    let status = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as *const () as libc::sighandler_t;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGRTMIN(), &action, std::ptr::null_mut())
    };
    if status == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[derive(Debug)]
struct KickTarget {
    thread: libc::pthread_t,
    immediate_exit: *const AtomicU8,
}

// SAFETY: the pointer is only dereferenced under the kicker's lock while the target is registered, and only as an
// atomic. A pthread_t is a plain number.
unsafe impl Send for KickTarget {}

/// Kicks a vCPU thread out of KVM_RUN. Does nothing after that thread has ended.
#[derive(Clone, Debug, Default)]
pub struct Kicker(Arc<Mutex<Option<KickTarget>>>);

impl Kicker {
    /// Makes the current or the next KVM_RUN of the registered thread return.
    pub fn kick(&self) {
        let target = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let Some(target) = target.as_ref() else { return };
        // SAFETY: registered, so the kvm_run page is mapped (see `register`) and the thread runs. The byte
        // has no invalid values, and both its other users, the kernel and that thread, expect it to change.
        unsafe {
            (*target.immediate_exit).store(1, Ordering::Release);
            libc::pthread_kill(target.thread, libc::SIGRTMIN());
        }
    }

    /// Registers the calling thread, which runs `vcpu`, until the result is dropped.
    ///
    /// # Safety
    /// The result must be dropped before `vcpu`, and on this thread.
    pub unsafe fn register(&self, vcpu: &mut VcpuFd) -> Registration {
        let immediate_exit = std::ptr::from_mut(&mut vcpu.get_kvm_run().immediate_exit).cast::<AtomicU8>();
        // SAFETY: pthread_self has no preconditions.
        let thread = unsafe { libc::pthread_self() };
        *self.0.lock().unwrap_or_else(|e| e.into_inner()) = Some(KickTarget {
            thread,
            immediate_exit,
        });
        Registration(self.clone())
    }
}

/// Registration of a thread that can be kicked. Dropping it ends the registration.
#[derive(Debug)]
pub struct Registration(Kicker);

impl Drop for Registration {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap_or_else(|e| e.into_inner()) = None;
    }
}
