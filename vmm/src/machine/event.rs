//! Events of a machine as a whole, and the callbacks that take them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use husk_virtio_console::GuestOpenFn;
use husk_virtio_vsock::RequestFn;

use crate::vcpu::VcpuEvent;

/// An event of the machine, reported on the thread that observed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VmEvent {
    /// Reported by a legacy device: poweroff, reset, panic.
    Guest(husk_devices::legacy::MachineEvent),
    /// A vCPU failed. Holds its index.
    Vcpu(u32, VcpuEvent),
    /// A disk holds failed requests until the machine is paused and resumed.
    DiskStopped {
        /// Id of the disk.
        disk: String,
        /// The first error.
        error: String,
    },
    /// The guest ejected PCI functions: call [`super::Machine::reap_ejected`].
    Ejected,
}

/// Callbacks of a machine, called on vCPU threads and device workers.
#[derive(Clone)]
pub struct Callbacks {
    /// Takes an event.
    pub event: Arc<dyn Fn(VmEvent) + Send + Sync>,
    /// Takes the time until the next call of [`super::Machine::rtc_alarm`], or `None` for no alarm.
    pub alarm: Arc<dyn Fn(Option<Duration>) + Send + Sync>,
    /// Takes the time until the next call of [`super::Machine::watchdog_alarm`], or `None` for no call.
    pub watchdog: Arc<dyn Fn(Option<Duration>) + Send + Sync>,
    /// Takes the name of a port of the console device, and whether the guest has it open.
    pub guest_open: GuestOpenFn,
    /// Takes a request of the guest to connect to the host by vsock.
    pub vsock_request: RequestFn,
}

impl std::fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Callbacks")
    }
}

pub(super) type EventFn = Arc<dyn Fn(VmEvent) + Send + Sync>;

/// Wraps `event`: before it takes an event that ends or resets the machine, no vCPU enters the guest any more.
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
