//! Which devices pass packets on. The switch of the whole machine stays as it is: it is everybody's, and writing it resets
//! those of all devices.

use std::collections::BTreeSet;

use nix::net::if_::if_indextoname;

use super::host_state::{ForwardingDevice, HostState, save_error};
use super::uplinks;
use crate::error::NetworkFault;
use crate::sysctl;

/// The switch of the machine.
const ALL: &str = "ipv4/conf/all/forwarding";

fn of(device: &str) -> String {
    format!("ipv4/conf/{device}/forwarding")
}

/// Has `bridge` and the devices that routes lead through pass packets on, unless this machine's do so anyway: the kernel
/// asks the device that a packet came in by, on its way there and back.
pub(super) fn enable(state: &mut HostState<'_>, bridge: u32) -> Result<(), NetworkFault> {
    if sysctl::is(ALL, "1")? {
        return Ok(());
    }
    let devices: BTreeSet<u32> = uplinks::all()?.into_iter().chain([bridge]).collect();
    for index in devices {
        // One that has gone meanwhile needs nothing.
        let Some(device) = if_indextoname(index)
            .ok()
            .and_then(|name| name.into_string().ok())
        else {
            continue;
        };
        let switch = of(&device);
        if sysctl::is(&switch, "0")? {
            let switched = ForwardingDevice { device, index };
            let keep = state.change(|done| {
                done.forwarding.retain(|other| *other != switched);
                done.forwarding.push(switched);
            });
            keep.map_err(save_error())?;
            sysctl::set(&switch, "1")?;
        }
    }
    Ok(())
}

/// Undoes it, where nobody else has decided since: the switch of the machine sets all others.
pub(super) fn restore(state: &mut HostState<'_>) -> Result<(), NetworkFault> {
    if sysctl::is(ALL, "0")? {
        for switched in state
            .done()
            .forwarding
            .iter()
            .filter(|switched| switched.is_there())
        {
            sysctl::set(&of(&switched.device), "0")?;
        }
    }
    state.change(|done| done.forwarding.clear()).map_err(save_error())
}
