//! The state of the device across a snapshot. The sockets belong to the host: the bytes in them are not a part of it,
//! and the restored device has others.

use husk_devices::component::{ComponentState, RestoreError, SaveError, check};
use serde::{Deserialize, Serialize};

use crate::control::PortControl;
use crate::device::Console;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ConsoleState {
    /// Names of the ports, from port 1.
    names: Vec<String>,
    /// The ports as the driver left them, from port 0; none before it was ready.
    ports: Option<Vec<PortState>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PortState {
    control: PortControl,
    /// The guest has opened the port.
    guest_open: bool,
    /// The host has, as the driver knows or is about to be told.
    host_open: bool,
    /// Bytes of the first available transmit buffer that the host has taken already.
    taken: u32,
}

pub(crate) fn save(console: &Console) -> Result<ComponentState, SaveError> {
    let mut ports = None;
    if let Some(left) = &console.ports {
        let mut states = Vec::new();
        for port in left {
            let too_long =
                || SaveError::Refused(format!("port {:?} sends more than 4 GiB at once", port.name));
            states.push(PortState {
                control: port.control,
                guest_open: port.guest_open,
                host_open: port.host_is_open(),
                taken: u32::try_from(port.taken).map_err(|_| too_long())?,
            });
        }
        ports = Some(states);
    }
    let names = console.sockets.iter().map(|(name, _)| name.clone()).collect();
    ComponentState::new(&ConsoleState { names, ports })
}

pub(crate) fn restore(console: &mut Console, state: &ComponentState) -> Result<(), RestoreError> {
    let state: ConsoleState = state.parse()?;
    let names = console.sockets.iter().map(|(name, _)| name);
    check(
        names.eq(&state.names),
        "device.names",
        "are not those of the ports",
    )?;
    let mut ports = None;
    if let Some(saved) = state.ports {
        let mut restored = console.new_ports();
        let same = saved.len() == restored.len();
        check(same, "device.ports", "has another number of ports")?;
        for (number, (port, saved)) in restored.iter_mut().zip(saved).enumerate() {
            let possible = saved.control.is_possible(number) && (number != 0 || !saved.guest_open);
            check(possible, "device.ports", "has a port as no driver leaves it")?;
            port.control = saved.control;
            port.taken = saved.taken.into();
            if port.host_is_open() != saved.host_open {
                port.control.host_changed();
            }
            port.set_guest_open(saved.guest_open);
        }
        ports = Some(restored);
    }
    console.ports = ports;
    for (number, (name, _)) in (1..).zip(&console.sockets) {
        let port = console.ports.as_ref().and_then(|ports| ports.get(number));
        (console.on_guest_open)(name, port.is_some_and(|port| port.guest_open));
    }
    Ok(())
}
