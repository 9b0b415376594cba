//! The layers between a vCPU exit and a device model: buses, PCI, interrupts, the virtio contract and its PCI
//! transport, the legacy devices, and the virtio devices too small for a crate of their own.
//!
//! This crate opens no files and does not depend on KVM: the machine implements its traits for interrupts and
//! ioeventfds.

#![warn(missing_docs)]

pub mod bus;
pub mod component;
pub mod ioeventfd;
pub mod legacy;
pub mod msi;
pub mod page_log;
pub mod pci;
pub mod sched_policy;
pub mod throttle;
pub mod virtio;
pub mod worker;

/// Guest memory as every device holds it, with a dirty bitmap. The machine replaces the map when the memory layout
/// changes.
pub type GuestMem = vm_memory::GuestMemoryAtomic<GuestMemMmap>;

/// The mapping behind [`GuestMem`].
pub type GuestMemMmap = vm_memory::GuestMemoryMmap<vm_memory::bitmap::AtomicBitmap>;
