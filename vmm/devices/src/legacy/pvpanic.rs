//! pvpanic on its ISA port: reports a panic of the guest kernel (QEMU docs/specs/pvpanic).

use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;
use crate::component::{Component, ComponentState, RestoreError, SaveError};
use crate::legacy::{EventSink, MachineEvent};

/// I/O port of the register.
pub const PORT: u64 = 0x505;

const PANICKED: u8 = 1 << 0;
const CRASH_LOADED: u8 = 1 << 1;

/// The pvpanic register: a read returns the supported events, a write reports one.
pub struct Pvpanic {
    events: EventSink,
    crash_seen: AtomicBool,
}

impl std::fmt::Debug for Pvpanic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pvpanic")
    }
}

impl Pvpanic {
    /// A device that reports to `events`.
    pub fn new(events: EventSink) -> Self {
        Self {
            events,
            crash_seen: AtomicBool::new(false),
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PvpanicState {
    /// The crash kernel was reported.
    crash_seen: bool,
}

impl Component for Pvpanic {
    fn reset(&self) {
        self.crash_seen.store(false, Ordering::Relaxed);
    }

    fn save(&self) -> Result<ComponentState, SaveError> {
        let crash_seen = self.crash_seen.load(Ordering::Relaxed);
        ComponentState::new(&PvpanicState { crash_seen })
    }

    fn restore(&self, state: &ComponentState) -> Result<(), RestoreError> {
        let state: PvpanicState = state.parse()?;
        self.crash_seen.store(state.crash_seen, Ordering::Relaxed);
        Ok(())
    }
}

impl BusDevice for Pvpanic {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
        data[0] = PANICKED | CRASH_LOADED;
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        if data[0] & PANICKED != 0 {
            (self.events)(MachineEvent::Panicked);
        } else if data[0] & CRASH_LOADED != 0 && !self.crash_seen.swap(true, Ordering::Relaxed) {
            // Reported once, so that a guest cannot flood its supervisor.
            (self.events)(MachineEvent::CrashLoaded);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn reports_a_panic_and_a_crash_kernel_only_once() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        let device = Pvpanic::new(Arc::new(move |e| log.lock().unwrap().push(e)));
        let mut byte = [0];
        device.read(0, &mut byte);
        assert_eq!(byte, [3]);
        device.write(0, &[2]);
        let state = device.save().unwrap();
        device.reset();
        device.restore(&state).unwrap();
        device.write(0, &[2]);
        device.write(0, &[0]);
        device.write(0, &[1]);
        assert_eq!(
            *seen.lock().unwrap(),
            [MachineEvent::CrashLoaded, MachineEvent::Panicked]
        );
    }
}
