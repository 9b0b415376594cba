//! Interrupts and notifications through KVM: irqfds for I/O APIC pins and MSI vectors, ioeventfds for queue
//! notifications.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use husk_devices::ioeventfd::IoEventFds;
use husk_devices::msi::{MsiAllocator, MsiMessage, MsiVector};
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KvmIrqRouting, kvm_irq_routing_entry,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Pins of the I/O APIC.
pub const IOAPIC_PINS: u32 = 24;
/// First GSI of MSI routes, after the I/O APIC's pins.
const FIRST_MSI_GSI: u32 = IOAPIC_PINS;
/// KVM's limit on routes.
const MAX_GSI: u32 = 4096;

/// The GSI routing table of one VM. Kept here because KVM_SET_GSI_ROUTING replaces the whole table.
struct RoutingTable {
    messages: BTreeMap<u32, Option<MsiMessage>>,
}

/// The GSI routing and ioeventfds of one VM.
pub struct Interrupts {
    vm: Arc<VmFd>,
    table: Mutex<RoutingTable>,
}

impl std::fmt::Debug for Interrupts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interrupts")
    }
}

fn os(error: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

impl Interrupts {
    /// Sets up the routing of `vm`, which has an in-kernel irqchip.
    pub fn new(vm: Arc<VmFd>) -> io::Result<Arc<Self>> {
        let interrupts = Self {
            vm,
            table: Mutex::new(RoutingTable {
                messages: BTreeMap::new(),
            }),
        };
        interrupts.commit(&BTreeMap::new())?;
        Ok(Arc::new(interrupts))
    }

    /// Creates an eventfd that pulses I/O APIC pin `pin` (edge-triggered, active high).
    pub fn pin(&self, pin: u32) -> io::Result<EventFd> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        self.vm.register_irqfd(&event, pin).map_err(os)?;
        Ok(event)
    }

    fn commit(&self, messages: &BTreeMap<u32, Option<MsiMessage>>) -> io::Result<()> {
        let pins = (0..IOAPIC_PINS).map(|pin| {
            let mut entry = kvm_irq_routing_entry {
                gsi: pin,
                type_: KVM_IRQ_ROUTING_IRQCHIP,
                ..Default::default()
            };
            entry.u.irqchip.irqchip = KVM_IRQCHIP_IOAPIC;
            entry.u.irqchip.pin = pin;
            entry
        });
        let msis = messages.iter().filter_map(|(&gsi, message)| {
            let message = (*message)?;
            let mut entry = kvm_irq_routing_entry {
                gsi,
                type_: KVM_IRQ_ROUTING_MSI,
                ..Default::default()
            };
            entry.u.msi.address_lo = message.address as u32;
            entry.u.msi.address_hi = (message.address >> 32) as u32;
            entry.u.msi.data = message.data;
            Some(entry)
        });
        let entries: Vec<_> = pins.chain(msis).collect();
        let routing =
            KvmIrqRouting::from_entries(&entries).map_err(|e| io::Error::other(format!("{e:?}")))?;
        self.vm.set_gsi_routing(&routing).map_err(os)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, RoutingTable> {
        self.table.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn set(&self, gsi: u32, message: MsiMessage) -> io::Result<()> {
        let mut table = self.lock();
        let previous = table.messages.insert(gsi, Some(message));
        if previous == Some(Some(message)) {
            return Ok(());
        }
        if let Err(error) = self.commit(&table.messages) {
            table.messages.insert(gsi, previous.flatten());
            return Err(error);
        }
        Ok(())
    }
}

/// [`Interrupts`] as the device crates use it.
#[derive(Clone, Debug)]
pub struct KvmInterrupts(pub Arc<Interrupts>);

impl MsiAllocator for KvmInterrupts {
    fn allocate(&self) -> io::Result<Box<dyn MsiVector>> {
        let trigger = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let mut table = self.0.lock();
        let gsi = (FIRST_MSI_GSI..MAX_GSI)
            .find(|gsi| !table.messages.contains_key(gsi))
            .ok_or_else(|| io::Error::other("no free GSI for an MSI route"))?;
        table.messages.insert(gsi, None);
        Ok(Box::new(MsiRoute {
            interrupts: self.0.clone(),
            gsi,
            trigger,
            connected: Mutex::new(false),
        }))
    }
}

struct MsiRoute {
    interrupts: Arc<Interrupts>,
    gsi: u32,
    trigger: EventFd,
    connected: Mutex<bool>,
}

impl MsiVector for MsiRoute {
    fn trigger(&self) -> &EventFd {
        &self.trigger
    }

    /// Masking only disconnects the eventfd. The route stays, because an update of the table costs an RCU grace period,
    /// and guests unmask with the same message.
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
        let mut connected = self.connected.lock().unwrap_or_else(|e| e.into_inner());
        let vm = &self.interrupts.vm;
        match message {
            Some(message) => {
                self.interrupts.set(self.gsi, message)?;
                if !*connected {
                    vm.register_irqfd(&self.trigger, self.gsi).map_err(os)?;
                    *connected = true;
                }
            }
            None if *connected => {
                vm.unregister_irqfd(&self.trigger, self.gsi).map_err(os)?;
                *connected = false;
            }
            None => {}
        }
        Ok(())
    }
}

impl Drop for MsiRoute {
    fn drop(&mut self) {
        if let Err(error) = self.route(None) {
            tracing::warn!(gsi = self.gsi, %error, "release interrupt");
        }
        self.interrupts.lock().messages.remove(&self.gsi);
    }
}

impl IoEventFds for KvmInterrupts {
    fn register(&self, address: u64, event: &EventFd) -> io::Result<()> {
        self.0
            .vm
            .register_ioevent(event, &IoEventAddress::Mmio(address), NoDatamatch)
            .map_err(os)
    }

    fn unregister(&self, address: u64, event: &EventFd) -> io::Result<()> {
        self.0
            .vm
            .unregister_ioevent(event, &IoEventAddress::Mmio(address), NoDatamatch)
            .map_err(os)
    }
}
