//! Message-signalled interrupts of PCI functions: a vector is an eventfd, and the guest programs its message (address
//! and data).

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// An MSI or MSI-X message: a write of `data` to `address` (PCI 3.0, section 6.8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Physical address of the write, in the local APIC window on x86.
    pub address: u64,
    /// Vector and delivery mode.
    pub data: u32,
}

/// One vector. A signal on `trigger` raises the interrupt last passed to [`MsiVector::route`] without an exit to this
/// process.
pub trait MsiVector: Send + Sync {
    /// The eventfd the interrupt controller listens on while a message is routed.
    fn trigger(&self) -> &EventFd;
    /// Connects the eventfd to `message`, or disconnects it (masked). Idempotent.
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()>;
}

/// Allocates vectors. The machine implements it with KVM's GSI routing and irqfd.
pub trait MsiAllocator: Send + Sync {
    /// A new vector, masked. Released on drop.
    fn allocate(&self) -> io::Result<Box<dyn MsiVector>>;
}
