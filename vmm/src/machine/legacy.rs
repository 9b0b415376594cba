//! The PC devices outside PCI, with their ports and interrupt lines.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use husk_devices::bus::Bus;
use husk_devices::component::{Component, ComponentError, Components, Stage};
use husk_devices::legacy::i8042::{self, I8042};
use husk_devices::legacy::power::{self, PowerEvent, PowerRegisters};
use husk_devices::legacy::pvpanic::{self, Pvpanic};
use husk_devices::legacy::rtc::{self, Rtc};
use husk_devices::legacy::serial::{self, SerialPort};
use husk_devices::pci::{PciHotplug, PciRoot, hotplug};
use vmm_sys_util::eventfd::EventFd;

use super::error::MachineError;
use super::event::{EventFn, VmEvent};
use crate::acpi::{GED_PIN, PCI_HOTPLUG_PORT};
use crate::interrupts::Interrupts;

/// Code at the BIOS entry point, in real mode: writes [`power::RESET_VALUE`] to the ACPI reset register.
/// `mov dx, port; mov al, value; out dx, al; hlt; jmp`.
pub const RESET_STUB: [u8; 9] = {
    let [low, high] = ((power::PORT + power::RESET) as u16).to_le_bytes();
    [0xba, low, high, 0xb0, power::RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd]
};

/// Slots that the guest has ejected, a bit each: set on a vCPU thread, taken by the machine's owner.
pub(super) type EjectedSlots = Arc<AtomicU32>;

/// Eventfds between the serial port and the console.
#[derive(Debug)]
pub struct SerialEvents {
    /// Signalled when guest output is waiting.
    pub output_ready: EventFd,
    /// Signalled when the guest accepts input again.
    pub input_wanted: EventFd,
}

/// The legacy devices that the machine uses or resets.
#[derive(Debug)]
pub struct LegacyDevices {
    /// ttyS0.
    pub serial: Arc<SerialPort>,
    /// The CMOS clock.
    pub rtc: Arc<Rtc>,
    /// ACPI power registers.
    pub power: Arc<PowerRegisters>,
    pvpanic: Arc<Pvpanic>,
    i8042: Arc<I8042>,
    /// ACPI PCI hotplug.
    pub hotplug: Arc<PciHotplug>,
}

impl LegacyDevices {
    pub(super) fn new(
        ports: &Bus,
        interrupts: &Interrupts,
        (root, ejected): (&Arc<PciRoot>, EjectedSlots),
        serial_events: SerialEvents,
        rtc_offset: i64,
        event: EventFn,
        alarm: Arc<dyn Fn(Option<Duration>) + Send + Sync>,
    ) -> Result<Self, MachineError> {
        let guest = event.clone();
        let sink: husk_devices::legacy::EventSink = Arc::new(move |e| guest(VmEvent::Guest(e)));
        let serial = Arc::new(SerialPort::new(
            interrupts.pin(serial::IRQ)?,
            serial_events.output_ready,
            serial_events.input_wanted,
        ));
        let timer = Box::new(move |due| alarm(due));
        let rtc = Arc::new(Rtc::new(
            rtc::host_clock(),
            rtc_offset,
            timer,
            interrupts.pin(rtc::IRQ)?,
        ));
        let power = Arc::new(PowerRegisters::new(sink.clone(), interrupts.pin(GED_PIN)?));
        let pvpanic = Arc::new(Pvpanic::new(sink.clone()));
        let notified = power.clone();
        let notify = move || {
            if let Err(error) = notified.notify(PowerEvent::PciHotplug) {
                tracing::warn!(%error, "cannot raise the PCI hotplug interrupt");
            }
        };
        // Runs on a vCPU thread. The machine's owner holds the last reference and drops the function.
        let on_eject = move |slot: u8, function| {
            drop(function);
            tracing::info!(slot, "PCI function ejected");
            ejected.fetch_or(1_u32 << slot, Ordering::AcqRel);
            event(VmEvent::Ejected);
        };
        let hotplug = Arc::new(PciHotplug::new(root.clone(), notify, on_eject));
        ports.insert(serial::PORT, serial::LEN, serial.clone())?;
        ports.insert(rtc::PORT, rtc::LEN, rtc.clone())?;
        ports.insert(power::PORT, power::LEN, power.clone())?;
        ports.insert(pvpanic::PORT, 1, pvpanic.clone())?;
        ports.insert(PCI_HOTPLUG_PORT, hotplug::REGISTERS, hotplug.clone())?;
        let i8042 = Arc::new(I8042::new(sink));
        ports.insert(i8042::PORT, i8042::LEN, i8042.clone())?;
        Ok(Self {
            serial,
            rtc,
            power,
            pvpanic,
            i8042,
            hotplug,
        })
    }

    /// Adds each device to the components of a machine.
    pub(super) fn add_to(&self, components: &mut Components) -> Result<(), ComponentError> {
        let devices: [(&str, Arc<dyn Component>); 6] = [
            ("pci-hotplug", self.hotplug.clone()),
            ("acpi-power", self.power.clone()),
            ("pvpanic", self.pvpanic.clone()),
            ("rtc", self.rtc.clone()),
            ("serial", self.serial.clone()),
            ("i8042", self.i8042.clone()),
        ];
        for (name, device) in devices {
            components.insert(Stage::Platform, name, device)?;
        }
        Ok(())
    }
}
