//! The registers of hardware-reduced ACPI (ACPI 6.5): sleep control and status (section 4.8.3.7), the
//! reset register (4.8.3.6) and the event register that the generic event device's `_EVT` method reads.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::BusDevice;
use crate::component::{Component, ComponentState, RestoreError, SaveError, check};
use crate::legacy::{EventSink, MachineEvent};

/// First port of the block.
pub const PORT: u64 = 0x600;
/// Length of the block.
pub const LEN: u64 = 8;
/// Sleep control register, 1 byte.
pub const SLEEP_CONTROL: u64 = 0;
/// Sleep status register, 1 byte.
pub const SLEEP_STATUS: u64 = 1;
/// Reset register, 1 byte: writing [`RESET_VALUE`] resets the machine.
pub const RESET: u64 = 2;
/// Event register, 4 bytes, cleared by reading: a bit for each of [`PowerEvent`].
pub const EVENTS: u64 = 4;
/// Value that resets the machine when written to [`RESET`].
pub const RESET_VALUE: u8 = 1;
/// `SLP_TYP` of S5, as the DSDT's `_S5` object says.
pub const S5: u8 = 5;

const SLP_EN: u8 = 1 << 5;

/// Cause of an interrupt of the generic event device; the value is the bit in the event register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum PowerEvent {
    /// The power button was pressed.
    PowerButton = 1 << 0,
    /// The PCI hotplug registers changed.
    PciHotplug = 1 << 1,
    /// The machine has a new generation ID.
    NewGeneration = 1 << 2,
}

/// Bits of all events.
const KNOWN_EVENTS: u32 =
    PowerEvent::PowerButton as u32 | PowerEvent::PciHotplug as u32 | PowerEvent::NewGeneration as u32;

/// The register block.
pub struct PowerRegisters {
    events: EventSink,
    interrupt: EventFd,
    pending: AtomicU32,
    latch: Mutex<[u8; 4]>,
}

impl std::fmt::Debug for PowerRegisters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PowerRegisters")
            .field("pending", &self.pending)
            .finish()
    }
}

impl PowerRegisters {
    /// Registers that report to `events` and interrupt the guest through `interrupt`.
    pub fn new(events: EventSink, interrupt: EventFd) -> Self {
        Self {
            events,
            interrupt,
            pending: AtomicU32::new(0),
            latch: Mutex::new([0; 4]),
        }
    }

    /// Raises an event towards the guest.
    pub fn notify(&self, event: PowerEvent) -> io::Result<()> {
        self.pending.fetch_or(event as u32, Ordering::AcqRel);
        self.interrupt.write(1)
    }

    /// Interrupts the guest again if it has not read all events. The I/O APIC drops an edge while the guest has no
    /// driver, and so masks the pin. Returns false if there is no event.
    pub fn repeat(&self) -> io::Result<bool> {
        let pending = self.pending.load(Ordering::Acquire) != 0;
        if pending {
            self.interrupt.write(1)?;
        }
        Ok(pending)
    }
}

/// The event register, and what a narrow read left of it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PowerState {
    pending: u32,
    latch: [u8; 4],
}

impl Component for PowerRegisters {
    /// Drops events that the guest has not seen.
    fn reset(&self) {
        self.pending.store(0, Ordering::Release);
        *self.latch.lock().unwrap_or_else(|e| e.into_inner()) = [0; 4];
    }

    fn save(&self) -> Result<ComponentState, SaveError> {
        ComponentState::new(&PowerState {
            pending: self.pending.load(Ordering::Acquire),
            latch: *self.latch.lock().unwrap_or_else(|e| e.into_inner()),
        })
    }

    fn restore(&self, state: &ComponentState) -> Result<(), RestoreError> {
        let state: PowerState = state.parse()?;
        let known = |events: u32| events & !KNOWN_EVENTS == 0;
        check(known(state.pending), "pending", "has an unknown event")?;
        check(
            known(u32::from_le_bytes(state.latch)),
            "latch",
            "has an unknown event",
        )?;
        self.pending.store(state.pending, Ordering::Release);
        *self.latch.lock().unwrap_or_else(|e| e.into_inner()) = state.latch;
        Ok(())
    }
}

impl BusDevice for PowerRegisters {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Some(at) = offset.checked_sub(EVENTS).map(|at| at as usize) else {
            return;
        };
        // A read of the first byte takes the events; narrower accesses read the rest from the latch.
        let mut latch = self.latch.lock().unwrap_or_else(|e| e.into_inner());
        if at == 0 {
            *latch = self.pending.swap(0, Ordering::AcqRel).to_le_bytes();
        }
        for (byte, value) in data.iter_mut().zip(latch.iter_mut().skip(at)) {
            *byte = std::mem::take(value);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        match (offset, data[0]) {
            (SLEEP_CONTROL, value) if value & SLP_EN != 0 && (value >> 2) & 7 == S5 => {
                (self.events)(MachineEvent::Poweroff);
            }
            (RESET, RESET_VALUE) => (self.events)(MachineEvent::Reset("ACPI reset register")),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn registers() -> (PowerRegisters, Arc<Mutex<Vec<MachineEvent>>>, EventFd) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let other = interrupt.try_clone().unwrap();
        (
            PowerRegisters::new(Arc::new(move |e| log.lock().unwrap().push(e)), interrupt),
            seen,
            other,
        )
    }

    #[test]
    fn s5_with_sleep_enable_powers_off_and_nothing_else_does() {
        let (device, seen, _) = registers();
        device.write(SLEEP_CONTROL, &[S5 << 2]);
        device.write(SLEEP_CONTROL, &[SLP_EN | (3 << 2)]);
        device.write(SLEEP_STATUS, &[0x80]);
        assert!(seen.lock().unwrap().is_empty());
        device.write(SLEEP_CONTROL, &[SLP_EN | (S5 << 2)]);
        assert_eq!(*seen.lock().unwrap(), [MachineEvent::Poweroff]);
    }

    #[test]
    fn the_reset_register_needs_its_value() {
        let (device, seen, _) = registers();
        device.write(RESET, &[0]);
        assert!(seen.lock().unwrap().is_empty());
        device.write(RESET, &[RESET_VALUE]);
        assert_eq!(seen.lock().unwrap().len(), 1);
    }

    #[test]
    fn events_interrupt_and_are_cleared_by_reading_at_any_width() {
        let (device, _, interrupt) = registers();
        device.notify(PowerEvent::PowerButton).unwrap();
        device.notify(PowerEvent::PciHotplug).unwrap();
        assert_eq!(interrupt.read().unwrap(), 2);
        let mut dword = [0; 4];
        device.read(EVENTS, &mut dword);
        assert_eq!(u32::from_le_bytes(dword), 3);
        device.read(EVENTS, &mut dword);
        assert_eq!(u32::from_le_bytes(dword), 0);

        device.notify(PowerEvent::PowerButton).unwrap();
        let mut byte = [0];
        device.read(EVENTS, &mut byte);
        assert_eq!(byte, [1]);
        device.read(EVENTS + 1, &mut byte);
        assert_eq!(byte, [0]);
    }

    #[test]
    fn the_interrupt_is_repeated_until_the_events_are_read() {
        let (device, _, interrupt) = registers();
        assert!(!device.repeat().unwrap() && interrupt.read().is_err());
        device.notify(PowerEvent::PciHotplug).unwrap();
        for _ in 0..2 {
            assert_eq!(interrupt.read().unwrap(), 1);
            assert!(device.repeat().unwrap());
        }
        device.read(EVENTS, &mut [0; 4]);
        interrupt.read().unwrap();
        assert!(!device.repeat().unwrap() && interrupt.read().is_err());
    }

    #[test]
    fn pending_events_and_the_rest_of_a_narrow_read_are_saved() {
        let (device, ..) = registers();
        device.notify(PowerEvent::PowerButton).unwrap();
        device.notify(PowerEvent::PciHotplug).unwrap();
        device.notify(PowerEvent::NewGeneration).unwrap();
        let read = |device: &PowerRegisters, len: usize| {
            let mut data = [0; 4];
            device.read(EVENTS, &mut data[..len]);
            data[0]
        };
        let (twin, _, interrupt) = registers();
        twin.restore(&device.save().unwrap()).unwrap();
        assert_eq!((read(&twin, 1), read(&twin, 1)), (7, 0));
        assert!(interrupt.read().is_err(), "the interrupt controller has it");
        let bad = serde_json::json!({"pending": 8, "latch": [0, 0, 0, 0]});
        let error = twin.restore(&bad.into()).unwrap_err().to_string();
        assert_eq!(error, "field \"pending\": has an unknown event");
        twin.restore(&device.save().unwrap()).unwrap();
        twin.reset();
        assert_eq!(read(&twin, 4), 0);
    }
}
