//! Guest writes that become eventfd signals inside the kernel (KVM's ioeventfd).

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// Registers ioeventfds. Implemented by the machine over KVM's ioeventfd.
pub trait IoEventFds: Send + Sync {
    /// A write of any value and width to guest-physical `address` signals `event` instead of exiting.
    fn register(&self, address: u64, event: &EventFd) -> io::Result<()>;
    /// Undoes [`IoEventFds::register`] with the same arguments.
    fn unregister(&self, address: u64, event: &EventFd) -> io::Result<()>;
}
