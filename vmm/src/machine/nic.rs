//! A NIC of a machine.

use std::io;

use husk_devices::pci::PciRootError;
use husk_devices::virtio::transport::VirtioPciError;
use husk_virtio_net::{Mac, Net, NetHandle, NetSetup};
use tokio::sync::oneshot;

/// Why a NIC does not come or go.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// Its files, or the kernel.
    #[error("interface {0:?}: {1}")]
    Io(String, io::Error),
    /// There is one of that id.
    #[error("the VM has an interface {0:?}")]
    Exists(String),
    /// There is none.
    #[error("the VM has no interface {0:?}")]
    NotFound(String),
    /// It is in a slot that the guest's firmware tables do not show as one to be unplugged.
    #[error("interface {0:?} was there from the beginning and cannot be unplugged")]
    Fixed(String),
    /// All slots are taken.
    #[error("no PCI slot for one more interface is free; the VM has {0}")]
    Slots(usize),
    /// The function.
    #[error("interface {0:?}: {1}")]
    Virtio(String, VirtioPciError),
    /// The bus.
    #[error(transparent)]
    Pci(#[from] PciRootError),
}

/// A NIC in its slot.
#[derive(Debug)]
pub struct Nic {
    /// The device.
    pub handle: NetHandle,
    /// As it was made with.
    pub mac: Mac,
    /// PCI slot on bus 0.
    pub slot: u8,
    /// Pairs of queues.
    pub pairs: usize,
    /// The kernel moves the frames.
    pub vhost: bool,
    /// The guest was asked to give it up.
    pub removing: bool,
    /// In a slot from which it can be taken.
    pub(super) pluggable: bool,
    /// Callers of a removal, answered when nothing of the NIC is left.
    pub(super) waiting: Vec<oneshot::Sender<()>>,
}

impl Nic {
    /// Creates the device for a PCI slot, and its entry.
    pub(super) fn new(setup: NetSetup, slot: u8, pluggable: bool) -> Result<(Box<Net>, Nic), NicError> {
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
            pluggable,
            waiting: Vec::new(),
        };
        Ok((Box::new(net), nic))
    }

    /// Drops the host's end of the device, and returns the callers who wait for that.
    pub(super) fn into_waiting(self) -> Vec<oneshot::Sender<()>> {
        self.waiting
    }
}
