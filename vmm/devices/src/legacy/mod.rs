//! The few PC devices a stock x86 Linux expects beside PCI: a 16550, a CMOS clock, the ACPI power
//! registers, pvpanic and the keyboard controller's reset line.

use std::sync::Arc;

pub mod i8042;
pub mod power;
pub mod pvpanic;
pub mod rtc;
pub mod serial;

/// An event of the guest that concerns the whole machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineEvent {
    /// The guest entered ACPI S5.
    Poweroff,
    /// The guest requested a reset through the named register.
    Reset(&'static str),
    /// The guest kernel panicked (pvpanic).
    Panicked,
    /// The guest kernel panicked and boots its crash kernel, so the VM continues.
    CrashLoaded,
}

/// Receives [`MachineEvent`]s, on the vCPU thread that caused them. Must not block.
pub type EventSink = Arc<dyn Fn(MachineEvent) + Send + Sync>;
