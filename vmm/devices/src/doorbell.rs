//! Guest writes that become eventfd signals inside the kernel (KVM's ioeventfd).

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// Registers doorbells. Implemented by the machine over KVM's ioeventfd.
pub trait Doorbells: Send + Sync {
    /// A write of any value and width to guest-physical `address` signals `event` instead of exiting.
    fn register(&self, address: u64, event: &EventFd) -> io::Result<()>;
    /// Undoes [`Doorbells::register`] with the same arguments.
    fn unregister(&self, address: u64, event: &EventFd) -> io::Result<()>;
}
