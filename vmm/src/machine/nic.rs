//! A NIC of a machine.

use std::io;

use husk_devices::component::ComponentError;
use husk_devices::pci::PciRootError;
use husk_devices::virtio::transport::VirtioPciError;
use husk_virtio_net::{Mac, Net, NetHandle, NetSetup};
use tokio::sync::oneshot;

/// Errors of plugging, unplugging and setting up a NIC.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// The tap or vhost descriptors are unusable.
    #[error("interface {0:?}: {1}")]
    Io(String, io::Error),
    /// The id is in use.
    #[error("the VM already has an interface {0:?}")]
    Exists(String),
    /// No NIC has this id.
    #[error("the VM has no interface {0:?}")]
    NotFound(String),
    /// The guest's ACPI tables do not have the NIC's slot.
    #[error(
        "interface {0:?} cannot be unplugged: the guest was saved by an older husk-vmm, which did not tell it of the slot"
    )]
    Fixed(String),
    /// No hot-pluggable slot is free.
    #[error("no free hotplug slot; the VM has {0} interfaces")]
    Slots(usize),
    /// The slot is not hot-pluggable.
    #[error("interface {0:?}: slot {1} is not hot-pluggable")]
    NotPluggable(String, u8),
    /// The slot has a function.
    #[error("interface {0:?}: slot {1} is occupied")]
    Occupied(String, u8),
    /// The virtio-pci function.
    #[error("interface {0:?}: {1}")]
    Virtio(String, VirtioPciError),
    /// Another component of the machine has the interface's name.
    #[error(transparent)]
    Component(#[from] ComponentError),
    /// The PCI bus.
    #[error(transparent)]
    Pci(#[from] PciRootError),
}

/// A NIC in its slot.
#[derive(Debug)]
pub struct Nic {
    /// The device.
    pub handle: NetHandle,
    /// MAC address from the configuration.
    pub mac: Mac,
    /// PCI slot on bus 0.
    pub slot: u8,
    /// Number of queue pairs.
    pub pairs: usize,
    /// True if vhost-net moves the frames.
    pub vhost: bool,
    /// True if the guest was asked to eject the NIC.
    pub removing: bool,
    /// Callers of a removal, answered when nothing of the NIC is left.
    pub(super) waiting: Vec<oneshot::Sender<()>>,
}

impl Nic {
    /// Creates the device for a PCI slot, and its entry.
    pub(super) fn new(setup: NetSetup, slot: u8) -> Result<(Box<Net>, Nic), NicError> {
        let (id, mac) = (setup.id.clone(), setup.mac);
        let pairs = setup.pairs.len();
        let vhost = setup.pairs.iter().any(|pair| pair.vhost.is_some());
        let (net, handle) = Net::new(setup).map_err(|e| NicError::Io(id, e))?;
        let nic = Nic {
            handle,
            mac,
            slot,
            pairs,
            vhost,
            removing: false,
            waiting: Vec::new(),
        };
        Ok((Box::new(net), nic))
    }

    /// Drops the host's end of the device, and returns the callers who wait for that.
    pub(super) fn into_waiting(self) -> Vec<oneshot::Sender<()>> {
        self.waiting
    }
}
