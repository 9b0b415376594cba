//! Errors of building and driving a machine.

use std::io;

use husk_devices::bus::BusError;
use husk_devices::component::ComponentError;
use husk_devices::pci::PciRootError;
use husk_devices::pci::config::ConfigError;
use husk_devices::virtio::transport::VirtioPciError;

use super::nic::NicError;
use super::saved::MachineMismatch;
use crate::acpi;
use crate::cpuid::TopologyError;
use crate::kvm::KvmError;
use crate::layout::LayoutError;
use crate::ram::MemoryError;
use crate::smbios;
use crate::vcpu::VcpuError;

/// Errors of building and driving a machine.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The CPU topology.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// KVM supports fewer vCPUs.
    #[error("{0} vCPUs are more than the {1} that this host's KVM supports")]
    Vcpus(u32, u32),
    /// The guest-physical address map.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A vCPU.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// ACPI tables.
    #[error(transparent)]
    Acpi(#[from] acpi::AcpiTooLarge),
    /// SMBIOS tables.
    #[error(transparent)]
    Smbios(#[from] smbios::SmbiosTooLarge),
    /// Two devices claim one address.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// A component of the machine.
    #[error(transparent)]
    Component(#[from] ComponentError),
    /// PCI.
    #[error(transparent)]
    Pci(#[from] PciRootError),
    /// A virtio device.
    #[error("{device}: {source}")]
    Virtio {
        /// Name of the device.
        device: String,
        /// The cause.
        source: VirtioPciError,
    },
    /// A NIC.
    #[error(transparent)]
    Nic(#[from] NicError),
    /// The SCSI controller, or a disk on it.
    #[error(transparent)]
    Scsi(#[from] husk_virtio_scsi::ScsiError),
    /// The console device.
    #[error("console: {0}")]
    Console(io::Error),
    /// The vsock device.
    #[error("vsock: {0}")]
    Vsock(io::Error),
    /// The watchdog.
    #[error("watchdog: {0}")]
    Watchdog(#[from] ConfigError),
    /// There are more devices than PCI slots.
    #[error("{0} devices do not fit the 31 PCI slots")]
    Slots(usize),
    /// The saved state does not fit this machine or this host.
    #[error("saved.state")]
    Saved(#[source] Box<MachineError>),
    /// The machine runs.
    #[error("the machine is not paused")]
    NotPaused,
    /// The saved machine is another one.
    #[error(transparent)]
    Mismatch(#[from] MachineMismatch),
    /// The saved state has another number of vCPUs or TSCs.
    #[error("the saved state has {vcpus} vCPUs and {tscs} TSCs, but the machine has {expected}")]
    SavedVcpus {
        /// Saved vCPUs.
        vcpus: usize,
        /// Saved TSCs.
        tscs: usize,
        /// vCPUs of the machine.
        expected: usize,
    },
    /// The saved machine has wider physical addresses than this host.
    #[error("the saved machine has {0} physical address bits, but this host has {1}")]
    AddressBits(u8, u8),
    /// An operating system resource.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// Guest memory could not be written.
    #[error("write guest memory: {0}")]
    Write(#[from] vm_memory::GuestMemoryError),
}
