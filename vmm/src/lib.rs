//! husk-vmm: one KVM virtual machine in one confined process.
//!
//! The process opens no files. Its monitor sends it descriptors and controls it by gRPC ([`control`]). The
//! machine's thread builds a [`machine::Machine`], and [`vcpu`] actors run the guest.

pub mod acpi;
pub mod boot;
pub mod control;
pub mod cpuid;
pub mod interrupts;
pub mod kvm;
pub mod kvm_struct;
pub mod layout;
pub mod machine;
pub mod memory_trim;
pub mod ram;
pub mod smbios;
pub mod vcpu;
pub mod vm_state;
