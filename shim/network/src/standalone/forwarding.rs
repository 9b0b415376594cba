//! IPv4 forwarding per device. The sysctl of the whole host stays unchanged: other programs share it, and writing it
//! resets all devices.

use std::collections::BTreeSet;

use super::host_state::{ForwardingDevice, HostState, save_error};
use super::uplinks;
use crate::device_index;
use crate::error::NetworkFault;
use crate::sysctl;

/// Forwarding of the whole host.
const ALL: &str = "ipv4/conf/all/forwarding";

fn of(device: &str) -> String {
    format!("ipv4/conf/{device}/forwarding")
}

/// Records on which devices [`enable`] is to enable forwarding: `bridge` and all devices with routes, unless the host
/// forwards anyway. The kernel checks the device that a packet came in by, in both directions.
pub(super) fn record(state: &mut HostState<'_>, bridge: u32) -> Result<(), NetworkFault> {
    if sysctl::is(ALL, "1")? {
        return Ok(());
    }
    let devices: BTreeSet<u32> = uplinks::all()?.into_iter().chain([bridge]).collect();
    for index in devices {
        // The device is gone.
        let Ok(device) = device_index::name(index) else {
            continue;
        };
        if sysctl::is(&of(&device), "0")? {
            let switched = ForwardingDevice { device, index };
            let keep = state.change(|done| {
                done.forwarding.retain(|other| *other != switched);
                done.forwarding.push(switched);
            });
            keep.map_err(save_error())?;
        }
    }
    Ok(())
}

/// The recorded devices, unless others have enabled forwarding for the host since.
pub(super) fn switched<'a>(state: &'a HostState<'_>) -> Result<Vec<&'a str>, NetworkFault> {
    if sysctl::is(ALL, "1")? {
        return Ok(Vec::new());
    }
    let recorded = state.done().forwarding.iter();
    Ok(recorded.map(|switched| switched.device.as_str()).collect())
}

/// Enables forwarding on the recorded devices.
pub(super) fn enable(state: &HostState<'_>) -> Result<(), NetworkFault> {
    if sysctl::is(ALL, "1")? {
        return Ok(());
    }
    let there = state
        .done()
        .forwarding
        .iter()
        .filter(|switched| switched.is_there());
    for switched in there {
        sysctl::set(&of(&switched.device), "1")?;
    }
    Ok(())
}

/// Disables forwarding again, unless another program has enabled it for the host, which sets it on all devices.
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
