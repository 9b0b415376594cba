//! Everything between a vCPU exit and a device model: buses, PCI, interrupts, the virtio contract
//! and its PCI transport, the legacy devices, and the virtio devices too small for a crate of their own.
//!
//! Nothing here opens a file or knows KVM: interrupts and ioeventfds are traits the machine implements.

pub mod bus;
pub mod ioeventfd;
pub mod legacy;
pub mod msi;
pub mod pci;
pub mod sched_policy;
pub mod virtio;
pub mod worker;

/// Guest memory as every device holds it: swappable when the layout changes, with a dirty bitmap.
pub type GuestMem = vm_memory::GuestMemoryAtomic<GuestMemMmap>;

/// The mapping behind [`GuestMem`].
pub type GuestMemMmap = vm_memory::GuestMemoryMmap<vm_memory::bitmap::AtomicBitmap>;
