//! The registry of the machine's components: its PCI functions, those plugged while it runs included, and all else that
//! holds state.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use husk_devices::GuestMem;
use husk_devices::component::{Component, Components, Stage};
use husk_devices::pci::{I6300esb, PciHotplug, PciRoot, PciRootError, SLOTS, WatchdogTimer};
use husk_devices::virtio::VirtioDevice;
use husk_devices::virtio::balloon::BalloonHandle;
use husk_devices::virtio::transport::{VirtioPci, VirtioPciError};
use husk_virtio_blk::BlkHandle;
use husk_virtio_net::NetSetup;
use tokio::sync::oneshot;

use super::error::MachineError;
use super::legacy::EjectedSlots;
use super::nic::{Nic, NicError};
use crate::interrupts::KvmInterrupts;

/// Size of the part of the 64-bit PCI window that a slot's BARs lie in.
const SLOT_WINDOW: u64 = 1 << 20;
/// Slots beyond the boot devices into which functions can be plugged.
const HOTPLUG_SLOTS: usize = 8;

/// Name of the watchdog among the machine's components.
const WATCHDOG: &str = "i6300esb";

/// The host's end of a device.
#[derive(Debug)]
pub(super) enum DeviceHandle {
    Blk(BlkHandle),
    Net(Nic),
    Balloon(BalloonHandle),
    /// No handle: the device needs none, or its handle is kept elsewhere.
    None,
}

/// A device on its PCI slot.
#[derive(Debug)]
struct RegisteredDevice {
    slot: u8,
    transport: Arc<VirtioPci>,
    handle: DeviceHandle,
}

/// The stable name of a virtio function among the machine's components.
fn component_name(transport: &VirtioPci) -> String {
    format!("virtio-{}", transport.name())
}

/// Every PCI function. The virtio devices that a machine starts with come first, in slot order.
#[derive(Debug)]
pub(super) struct DeviceRegistry {
    /// Every component that holds state, the functions and the bus included.
    pub components: Components,
    pub root: Arc<PciRoot>,
    pub hotplug: Arc<PciHotplug>,
    pub memory: GuestMem,
    pub interrupts: KvmInterrupts,
    /// Start of the 64-bit PCI window.
    pub window: u64,
    pub ejected: EjectedSlots,
    devices: Vec<RegisteredDevice>,
    watchdog: Option<Arc<I6300esb>>,
    watchdog_slot: Option<u8>,
    /// Slots that the ACPI tables describe as hot-pluggable, highest first.
    hotplug_slots: Vec<u8>,
    /// Slots of the NICs that the machine starts with.
    nic_slots: Vec<u8>,
    /// The guest's ACPI tables have the slots of those NICs.
    nics_described: bool,
}

impl DeviceRegistry {
    pub(super) fn new(
        root: Arc<PciRoot>,
        (hotplug, ejected): (Arc<PciHotplug>, EjectedSlots),
        memory: GuestMem,
        interrupts: KvmInterrupts,
        window: u64,
    ) -> Self {
        Self {
            components: Components::default(),
            root,
            hotplug,
            memory,
            interrupts,
            window,
            ejected,
            devices: Vec::new(),
            watchdog: None,
            watchdog_slot: None,
            hotplug_slots: Vec::new(),
            nic_slots: Vec::new(),
            nics_described: true,
        }
    }

    /// Guest-physical address of a slot's BARs at power-on.
    fn bars_at(&self, slot: u8) -> u64 {
        self.window + u64::from(slot) * SLOT_WINDOW
    }

    fn transport(&self, slot: u8, device: Box<dyn VirtioDevice>) -> Result<Arc<VirtioPci>, VirtioPciError> {
        let bar = self.bars_at(slot);
        let notifiers = Arc::new(self.interrupts.clone());
        VirtioPci::new(device, self.memory.clone(), &self.interrupts, notifiers, bar)
    }

    /// Puts the devices a machine starts with on slots 1, 2, …
    pub(super) fn add_boot_devices(
        &mut self,
        devices: Vec<(Box<dyn VirtioDevice>, DeviceHandle)>,
    ) -> Result<(), MachineError> {
        if devices.len() >= usize::from(SLOTS) {
            return Err(MachineError::Slots(devices.len()));
        }
        for (slot, (device, handle)) in (1..SLOTS).zip(devices) {
            let name = device.name().to_owned();
            let transport = self
                .transport(slot, device)
                .map_err(|source| MachineError::Virtio { device: name, source })?;
            self.root.add(slot, transport.clone())?;
            self.components
                .insert(Stage::Function, component_name(&transport), transport.clone())?;
            if matches!(handle, DeviceHandle::Net(_)) {
                self.nic_slots.push(slot);
            }
            self.devices.push(RegisteredDevice {
                slot,
                transport,
                handle,
            });
        }
        let first = self.devices.last().map_or(1, |device| device.slot + 1);
        self.hotplug_slots_from(first);
        Ok(())
    }

    fn hotplug_slots_from(&mut self, first: u8) {
        self.hotplug_slots = (first..SLOTS).rev().take(HOTPLUG_SLOTS).collect();
    }

    /// Puts a watchdog on the slot after the boot devices'.
    pub(super) fn add_watchdog(&mut self, timer: WatchdogTimer) -> Result<(), MachineError> {
        let slot = self.devices.last().map_or(1, |device| device.slot + 1);
        if slot >= SLOTS {
            return Err(MachineError::Slots(usize::from(slot)));
        }
        let watchdog = Arc::new(I6300esb::new(self.bars_at(slot), timer)?);
        self.root.add(slot, watchdog.clone())?;
        self.components.insert(Stage::Clock, WATCHDOG, watchdog.clone())?;
        self.watchdog = Some(watchdog);
        self.watchdog_slot = Some(slot);
        self.hotplug_slots_from(slot + 1);
        Ok(())
    }

    pub(super) fn watchdog_alarm(&self) -> bool {
        self.watchdog.as_ref().is_some_and(|watchdog| watchdog.alarm())
    }

    /// The name of the function in each slot.
    pub(super) fn functions(&self) -> BTreeMap<u8, String> {
        let virtio = self.devices.iter();
        let virtio = virtio.map(|device| (device.slot, component_name(&device.transport)));
        let watchdog = self.watchdog_slot.map(|slot| (slot, WATCHDOG.to_owned()));
        virtio.chain(watchdog).collect()
    }

    pub(super) fn hotplug_slots(&self) -> &[u8] {
        &self.hotplug_slots
    }

    /// Slots of the NICs that the machine starts with, if the guest can eject them.
    pub(super) fn nic_slots(&self) -> &[u8] {
        match self.nics_described {
            true => &self.nic_slots,
            false => &[],
        }
    }

    /// Records whether the guest's ACPI tables have the slots of the NICs that the machine starts with.
    pub(super) fn set_nics_described(&mut self, described: bool) {
        self.nics_described = described;
    }

    /// True if the guest can eject a NIC in this slot.
    pub(super) fn is_ejectable(&self, slot: u8) -> bool {
        self.hotplug_slots.contains(&slot) || self.nic_slots().contains(&slot)
    }

    /// Removes every function from the PCI bus. The functions and the bus refer to each other, so that neither would be
    /// dropped otherwise.
    pub(super) fn clear(&mut self) {
        for slot in 1..SLOTS {
            drop(self.root.remove(slot));
        }
        self.components.remove_stage(Stage::Clock);
        self.components.remove_stage(Stage::Function);
        self.devices.clear();
    }

    pub(super) fn blk_disks(&self) -> impl Iterator<Item = &BlkHandle> {
        self.devices.iter().filter_map(|device| match &device.handle {
            DeviceHandle::Blk(disk) => Some(disk),
            _ => None,
        })
    }

    pub(super) fn balloon(&self) -> Option<&BalloonHandle> {
        self.devices.iter().find_map(|device| match &device.handle {
            DeviceHandle::Balloon(balloon) => Some(balloon),
            _ => None,
        })
    }

    pub(super) fn nics(&self) -> impl Iterator<Item = &Nic> {
        self.devices.iter().filter_map(|device| match &device.handle {
            DeviceHandle::Net(nic) => Some(nic),
            _ => None,
        })
    }

    fn find_nic(&mut self, id: &str) -> Result<&mut Nic, NicError> {
        let nics = self
            .devices
            .iter_mut()
            .filter_map(|device| match &mut device.handle {
                DeviceHandle::Net(nic) => Some(nic),
                _ => None,
            });
        let mut of_id = nics.filter(|nic| nic.handle.id() == id);
        of_id.next().ok_or_else(|| NicError::NotFound(id.to_owned()))
    }

    /// Plugs a NIC into a slot, or the lowest free one that is hot-pluggable, and notifies the guest. Returns the slot.
    pub(super) fn add_nic(
        &mut self,
        setup: NetSetup,
        wanted: Option<u8>,
        paused: bool,
    ) -> Result<u8, NicError> {
        // A function that the guest has ejected has left the bus, and may still be in the table.
        let taken =
            |slot: u8| self.root.is_occupied(slot) || self.devices.iter().any(|device| device.slot == slot);
        let slot = match wanted {
            Some(slot) if !self.is_ejectable(slot) => return Err(NicError::NotPluggable(setup.id, slot)),
            Some(slot) if taken(slot) => return Err(NicError::Occupied(setup.id, slot)),
            Some(slot) => slot,
            None => {
                let mut lowest_first = self.hotplug_slots.iter().rev().copied();
                let free = lowest_first.find(|slot| !taken(*slot));
                free.ok_or_else(|| NicError::Slots(self.nics().count()))?
            }
        };
        let hotplug = self.hotplug.clone();
        self.insert_nic(slot, setup, |transport| {
            if paused {
                transport.pause();
            }
            hotplug.add(slot, transport)
        })?;
        Ok(slot)
    }

    /// Puts a NIC that was plugged into a saved machine on its slot again.
    pub(super) fn add_plugged_nic(&mut self, slot: u8, setup: NetSetup) -> Result<(), NicError> {
        if !self.hotplug_slots.contains(&slot) {
            return Err(NicError::NotPluggable(setup.id, slot));
        }
        let root = self.root.clone();
        self.insert_nic(slot, setup, |transport| root.add(slot, transport))
    }

    /// Adds a NIC, which `plug` puts on the bus.
    fn insert_nic(
        &mut self,
        slot: u8,
        setup: NetSetup,
        plug: impl FnOnce(Arc<VirtioPci>) -> Result<(), PciRootError>,
    ) -> Result<(), NicError> {
        if self.nics().any(|nic| nic.handle.id() == setup.id) {
            return Err(NicError::Exists(setup.id));
        }
        let (net, nic) = Nic::new(setup, slot)?;
        let transport = self
            .transport(slot, net)
            .map_err(|e| NicError::Virtio(nic.handle.id().to_owned(), e))?;
        self.components
            .insert(Stage::Function, component_name(&transport), transport.clone())?;
        if let Err(error) = plug(transport.clone()) {
            self.components.remove(&component_name(&transport));
            return Err(error.into());
        }
        let handle = DeviceHandle::Net(nic);
        self.devices.push(RegisteredDevice {
            slot,
            transport,
            handle,
        });
        Ok(())
    }

    /// Asks the guest to eject a NIC. The receiver is answered, if ever, when nothing of the NIC is left.
    pub(super) fn remove_nic(&mut self, id: &str) -> Result<oneshot::Receiver<()>, NicError> {
        let slot = self.find_nic(id)?.slot;
        if !self.is_ejectable(slot) {
            return Err(NicError::Fixed(id.to_owned()));
        }
        let (done, gone) = oneshot::channel();
        let nic = self.find_nic(id)?;
        nic.removing = true;
        nic.waiting.retain(|waiting| !waiting.is_closed());
        nic.waiting.push(done);
        match self.hotplug.request_removal(slot) {
            // The guest is ejecting it: `reap_ejected` answers.
            Ok(()) | Err(PciRootError::BadSlot(_)) => Ok(gone),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn set_link(&mut self, id: &str, up: bool) -> Result<(), NicError> {
        self.find_nic(id)?.handle.set_link(up);
        Ok(())
    }

    /// Drops the functions that the guest has ejected since the last call, then answers those who wait for that.
    pub(super) fn reap_ejected(&mut self) {
        let slots = self.ejected.swap(0, Ordering::AcqRel);
        let is_gone = |device: &mut RegisteredDevice| slots & 1 << device.slot != 0;
        let gone: Vec<_> = self.devices.extract_if(.., is_gone).collect();
        for RegisteredDevice {
            transport, handle, ..
        } in gone
        {
            self.components.remove(&component_name(&transport));
            drop(transport);
            if let DeviceHandle::Net(nic) = handle {
                for waiting in nic.into_waiting() {
                    // A caller that has given up may ask Info.
                    let _ = waiting.send(());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::machine::testing::machine;

    #[test]
    #[ignore = "needs /dev/kvm"]
    fn the_watchdog_stops_before_the_disks_complete_their_requests() {
        let machine = machine();
        let names: Vec<_> = machine.devices.components.names().collect();
        assert_eq!(names[..2], [super::WATCHDOG, "virtio-blk-root"]);
    }
}
