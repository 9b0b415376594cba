//! Message-signalled interrupts, as PCI functions see them: vectors that are an eventfd whose message
//! (address and data) the guest programs.

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// An MSI or MSI-X message: what a write of `data` to `address` would tell the interrupt controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Physical address of the write, in the local APIC window on x86.
    pub address: u64,
    /// Vector and delivery mode.
    pub data: u32,
}

/// One vector: signalling `trigger` raises the interrupt last given to [`MsiVector::route`], with no exit to us.
pub trait MsiVector: Send + Sync {
    /// The eventfd the interrupt controller listens on while a message is routed.
    fn trigger(&self) -> &EventFd;
    /// Connects the eventfd to `message`, or disconnects it (masked). Idempotent.
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()>;
}

/// Hands out vectors. Implemented by the machine over KVM's GSI routing and irqfd.
pub trait MsiAllocator: Send + Sync {
    /// A new vector, masked. Released on drop.
    fn allocate(&self) -> io::Result<Box<dyn MsiVector>>;
}
