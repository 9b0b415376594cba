//! The keyboard controller, reduced to the one thing kernels without ACPI use it for: pulsing the CPU
//! reset line. No keyboard; the FADT says there is none.

use serde::{Deserialize, Serialize};

use crate::bus::BusDevice;
use crate::component::{Component, ComponentState, RestoreError, SaveError};
use crate::legacy::{EventSink, MachineEvent};

/// First port: 0x60 (data) to 0x64 (status and command).
pub const PORT: u64 = 0x60;
/// Length of the port range.
pub const LEN: u64 = 5;

const COMMAND: u64 = 4;
const PULSE_RESET: u8 = 0xfe;

/// Reset-only 8042.
pub struct I8042 {
    events: EventSink,
}

impl std::fmt::Debug for I8042 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("I8042")
    }
}

impl I8042 {
    /// A controller that reports resets to `events`.
    pub fn new(events: EventSink) -> Self {
        Self { events }
    }
}

/// The controller holds nothing.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct I8042State {}

impl Component for I8042 {
    fn reset(&self) {}

    fn save(&self) -> Result<ComponentState, SaveError> {
        ComponentState::new(&I8042State {})
    }

    fn restore(&self, state: &ComponentState) -> Result<(), RestoreError> {
        state.parse::<I8042State>().map(|_| ())
    }
}

impl BusDevice for I8042 {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // Both buffers empty: a driver that waits to write a command may do so at once.
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == COMMAND && data == [PULSE_RESET] {
            (self.events)(MachineEvent::Reset("i8042"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn only_the_pulse_command_resets() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        let device = I8042::new(Arc::new(move |e| log.lock().unwrap().push(e)));
        device.write(0, &[0xfe]);
        device.write(4, &[0xd1]);
        assert!(seen.lock().unwrap().is_empty());
        device.write(4, &[0xfe]);
        assert_eq!(*seen.lock().unwrap(), [MachineEvent::Reset("i8042")]);
    }
}
