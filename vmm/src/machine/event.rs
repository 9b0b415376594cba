//! Events of a machine as a whole, and the callbacks that take them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::vcpu::VcpuEvent;

/// What ends, resets or otherwise concerns a machine, from whichever thread saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmEvent {
    /// The guest asked.
    Guest(husk_devices::legacy::MachineEvent),
    /// A vCPU stopped by itself.
    Vcpu(u32, VcpuEvent),
    /// A disk holds requests that failed, until the machine was paused and runs again.
    DiskStopped {
        /// Its id.
        disk: String,
        /// The first failure.
        error: String,
    },
    /// The guest let go of PCI functions: see [`super::Machine::reap_ejected`].
    Ejected,
}

/// Where a machine reports and asks for timers. All are called on vCPU threads or device workers.
#[derive(Clone)]
pub struct Callbacks {
    /// An event.
    pub event: Arc<dyn Fn(VmEvent) + Send + Sync>,
    /// When to call [`husk_devices::legacy::rtc::Rtc::alarm`] next.
    pub alarm: Arc<dyn Fn(Option<Duration>) + Send + Sync>,
}

impl std::fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Callbacks")
    }
}

pub(super) type EventFn = Arc<dyn Fn(VmEvent) + Send + Sync>;

/// Stops vCPUs from entering the guest again before anybody hears of an event that ends or resets it.
pub(super) fn halt_on_final_event(event: EventFn, halted: Arc<AtomicBool>) -> EventFn {
    use husk_devices::legacy::MachineEvent::CrashLoaded;
    Arc::new(move |e| {
        let goes_on = matches!(
            e,
            VmEvent::Guest(CrashLoaded) | VmEvent::DiskStopped { .. } | VmEvent::Ejected
        );
        if !goes_on {
            halted.store(true, Ordering::Release);
        }
        event(e);
    })
}
