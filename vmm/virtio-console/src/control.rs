//! Control messages, and what a port still has to tell the driver (virtio 1.2, section 5.3.6.2).

use serde::{Deserialize, Serialize};

use crate::port::Port;

/// Bytes of `struct virtio_console_control`.
pub(crate) const MESSAGE_LEN: usize = 8;

const DEVICE_READY: u16 = 0;
const DEVICE_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;

/// `struct virtio_console_control`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ControlMessage {
    id: u32,
    event: u16,
    value: u16,
}

impl ControlMessage {
    fn parse(bytes: [u8; MESSAGE_LEN]) -> Self {
        let [a, b, c, d, event @ .., e, f] = bytes;
        Self {
            id: u32::from_le_bytes([a, b, c, d]),
            event: u16::from_le_bytes(event),
            value: u16::from_le_bytes([e, f]),
        }
    }

    fn to_bytes(self) -> Vec<u8> {
        let mut bytes = self.id.to_le_bytes().to_vec();
        bytes.extend(self.event.to_le_bytes());
        bytes.extend(self.value.to_le_bytes());
        bytes
    }
}

/// What the driver knows of a port, and what it is still to be told. As facts, not as a queue of messages, so that a
/// driver that asks again and again and never reads costs no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PortControl {
    /// DEVICE_ADD is due.
    add: bool,
    /// The driver knows that the port exists.
    known: bool,
    /// The driver has set up the port.
    ready: bool,
    /// PORT_NAME is due.
    name: bool,
    /// PORT_OPEN, with the host's state, is due.
    open: bool,
}

impl PortControl {
    /// The host has closed its end, or another has taken its place.
    pub fn host_changed(&mut self) {
        self.open = self.ready;
    }

    /// True if the driver can have brought a port here. `number` is that of the port.
    pub fn is_possible(&self, number: usize) -> bool {
        let nothing = *self == Self::default();
        let announced = !(self.add && self.known);
        let set_up = self.known || !(self.ready || self.name || self.open);
        if number == 0 { nothing } else { announced && set_up }
    }
}

/// Applies a message of the driver. One that is unknown, or about an unknown port, has no effect. Returns the number of
/// the port that the guest opens (true) or closes.
pub(crate) fn apply(message: [u8; MESSAGE_LEN], ports: &mut [Port]) -> Option<(usize, bool)> {
    let ControlMessage { id, event, value } = ControlMessage::parse(message);
    let yes = value != 0;
    if event == DEVICE_READY {
        // Port 0 is never announced.
        for port in ports.iter_mut().skip(1).filter(|_| yes) {
            // A port that exists must not be added again.
            port.control.add = !port.control.known;
        }
        return None;
    }
    let number = id as usize;
    let port = ports.get_mut(number).filter(|_| number != 0)?;
    match event {
        PORT_READY => {
            // After a suspension a driver goes on with the ports that it had, without asking for them.
            port.control = PortControl {
                add: false,
                known: true,
                ready: yes,
                name: yes,
                open: yes && port.host_is_open(),
            };
            None
        }
        PORT_OPEN => (yes != port.guest_open).then_some((number, yes)),
        _ => None,
    }
}

/// The next message to the driver. Call `sent` on its port when the driver has got it.
pub(crate) fn next_message(ports: &[Port]) -> Option<(usize, Vec<u8>)> {
    ports.iter().enumerate().find_map(|(number, port)| {
        let message = |event, value: bool| {
            let (id, value) = (number as u32, value.into());
            ControlMessage { id, event, value }.to_bytes()
        };
        let bytes = match port.control {
            PortControl { add: true, .. } => message(DEVICE_ADD, true),
            // Without a NUL at its end.
            PortControl { name: true, .. } => [message(PORT_NAME, true), port.name.clone().into()].concat(),
            PortControl { open: true, .. } => message(PORT_OPEN, port.host_is_open()),
            _ => return None,
        };
        Some((number, bytes))
    })
}

/// Notes that the driver has got the message that [`next_message`] returned for the port.
pub(crate) fn sent(control: &mut PortControl) {
    if control.add {
        (control.add, control.known) = (false, true);
    } else if control.name {
        control.name = false;
    } else {
        control.open = false;
    }
}
