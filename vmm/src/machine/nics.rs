//! The NICs of a machine: those it began with, and those that come and go in the slots that can be hot-plugged.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use husk_devices::GuestMem;
use husk_devices::pci::{PciHotplug, PciRoot, PciRootError};
use husk_devices::virtio::transport::{VirtioPci, VirtioPciError};
use husk_virtio_net::{Mac, Net, NetHandle, NetSetup};
use tokio::sync::oneshot;

use super::virtio;
use crate::interrupts::KvmInterrupts;

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
    pluggable: bool,
    waiting: Vec<oneshot::Sender<()>>,
}

impl Nic {
    /// Makes the device, and the entry for it in a slot still to be chosen.
    pub(super) fn make(setup: NetSetup) -> Result<(Box<Net>, Nic), NicError> {
        let (id, mac) = (setup.id.clone(), setup.mac);
        let pairs = setup.pairs.len();
        let vhost = setup.pairs.iter().any(|pair| pair.vhost.is_some());
        let (net, handle) = Net::new(setup).map_err(|e| NicError::Io(id, e))?;
        let nic = Nic {
            handle,
            mac,
            slot: 0,
            pairs,
            vhost,
            removing: false,
            pluggable: false,
            waiting: Vec::new(),
        };
        Ok((Box::new(net), nic))
    }
}

/// Slots that guests have let go of, on their way from a vCPU to the machine's owner.
pub(super) type EjectedSlots = Arc<AtomicU32>;

/// The table of NICs.
#[derive(Debug)]
pub(super) struct NicTable {
    table: Vec<Nic>,
    /// Those that the ACPI tables describe, highest first.
    slots: Vec<u8>,
    ejected: EjectedSlots,
}

/// Where a NIC is plugged in.
pub(super) struct HotplugContext<'m> {
    pub root: &'m PciRoot,
    pub hotplug: &'m PciHotplug,
    pub memory: &'m GuestMem,
    pub interrupts: &'m KvmInterrupts,
    /// Where BARs are.
    pub window: u64,
}

impl NicTable {
    pub(super) fn new(table: Vec<Nic>, slots: Vec<u8>, ejected: EjectedSlots) -> Self {
        Self {
            table,
            slots,
            ejected,
        }
    }

    pub(super) fn table(&self) -> &[Nic] {
        &self.table
    }

    pub(super) fn slots(&self) -> &[u8] {
        &self.slots
    }

    fn find(&mut self, id: &str) -> Result<&mut Nic, NicError> {
        let nic = self.table.iter_mut().find(|nic| nic.handle.id() == id);
        nic.ok_or_else(|| NicError::NotFound(id.to_owned()))
    }

    /// Plugs a NIC in and tells the guest.
    pub(super) fn add(
        &mut self,
        setup: NetSetup,
        to: &HotplugContext<'_>,
    ) -> Result<Arc<VirtioPci>, NicError> {
        if self.table.iter().any(|nic| nic.handle.id() == setup.id) {
            return Err(NicError::Exists(setup.id));
        }
        // What a guest let go of has left the bus, and may still be in the table.
        let taken = |slot: u8| to.root.is_occupied(slot) || self.table.iter().any(|nic| nic.slot == slot);
        let free = self.slots.iter().rev().copied().find(|slot| !taken(*slot));
        let slot = free.ok_or(NicError::Slots(self.table.len()))?;
        let (net, mut nic) = Nic::make(setup)?;
        let bar = to.window + u64::from(slot) * virtio::BAR_STRIDE;
        let doorbells = Arc::new(to.interrupts.clone());
        let transport = VirtioPci::new(net, to.memory.clone(), to.interrupts, doorbells, bar)
            .map_err(|e| NicError::Virtio(nic.handle.id().to_owned(), e))?;
        (nic.slot, nic.pluggable) = (slot, true);
        to.hotplug.add(slot, transport.clone())?;
        self.table.push(nic);
        Ok(transport)
    }

    /// Asks the guest to give a NIC up. The answer comes, if ever, when it has, and nothing of the NIC is left.
    pub(super) fn remove(
        &mut self,
        id: &str,
        hotplug: &PciHotplug,
    ) -> Result<oneshot::Receiver<()>, NicError> {
        let nic = self.find(id)?;
        if !nic.pluggable {
            return Err(NicError::Fixed(id.to_owned()));
        }
        let (done, gone) = oneshot::channel();
        nic.removing = true;
        nic.waiting.retain(|waiting| !waiting.is_closed());
        nic.waiting.push(done);
        let slot = nic.slot;
        hotplug.request_removal(slot)?;
        Ok(gone)
    }

    pub(super) fn set_link(&mut self, id: &str, up: bool) -> Result<(), NicError> {
        self.find(id)?.handle.set_link(up);
        Ok(())
    }

    /// Forgets the NICs that guests let go of since the last time. `left` is called with all of their names before
    /// those who wait are told.
    pub(super) fn reap_ejected(&mut self, left: impl FnOnce(&[String])) {
        let slots = self.ejected.swap(0, Ordering::AcqRel);
        let gone = |nic: &mut Nic| nic.pluggable && slots & 1 << nic.slot != 0;
        let gone: Vec<Nic> = self.table.extract_if(.., gone).collect();
        if gone.is_empty() {
            return;
        }
        let names: Vec<String> = gone
            .iter()
            .map(|nic| format!("net-{}", nic.handle.id()))
            .collect();
        left(&names);
        for waiting in gone.into_iter().flat_map(|nic| nic.waiting) {
            // Whoever gave up waiting may ask Info.
            let _ = waiting.send(());
        }
    }
}
