//! The few PC devices a stock x86 Linux expects beside PCI: a 16550, a CMOS clock, the ACPI power
//! registers, pvpanic and the keyboard controller's reset line.

use std::sync::Arc;

pub mod i8042;
pub mod power;
pub mod pvpanic;
pub mod rtc;
pub mod serial;

/// What the guest asked of, or did to, the machine as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineEvent {
    /// ACPI S5.
    Poweroff,
    /// A reset, and by which register.
    Reset(&'static str),
    /// The guest kernel panicked (pvpanic).
    Panicked,
    /// The guest kernel panicked and loads its crash kernel: it goes on.
    CrashLoaded,
}

/// Where devices report [`MachineEvent`]s. Called on the vCPU thread that caused it; must not block.
pub type EventSink = Arc<dyn Fn(MachineEvent) + Send + Sync>;
