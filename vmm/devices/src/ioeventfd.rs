//! Guest writes that the kernel turns into eventfd signals (KVM's ioeventfd).

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// Registers ioeventfds. The machine implements it with `KVM_IOEVENTFD`.
pub trait IoEventFds: Send + Sync {
    /// A write of any value and width to guest-physical `address` signals `event` instead of exiting.
    fn register(&self, address: u64, event: &EventFd) -> io::Result<()>;
    /// Undoes [`IoEventFds::register`] with the same arguments.
    fn unregister(&self, address: u64, event: &EventFd) -> io::Result<()>;
}
