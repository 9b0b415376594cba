//! Interfaces that were plugged while the VM ran. Those of the plan are restored from it.

use std::collections::HashSet;

use husk_network::{DeviceNames, MacAddr};
use husk_vmi::{NicDhcp, VmPlan};
use serde::{Deserialize, Serialize};

use super::check::{MOST_NICS, is_name};

/// PCI slots of a bus, but for the host bridge's.
const SLOTS: std::ops::RangeInclusive<u8> = 1..=31;
/// Queue pairs of a tap.
const QUEUES: std::ops::RangeInclusive<u16> = 1..=256;

/// An interface that was plugged while the VM ran. Its binding is `bridge`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PluggedInterface {
    pub(crate) name: String,
    /// The device of its network in the VM's namespace.
    pub(crate) device: String,
    pub(crate) mac: MacAddr,
    pub(crate) queues: u16,
    pub(crate) link_up: bool,
    /// The slot of its NIC, which the guest knows it by.
    pub(crate) pci_slot: u8,
    #[serde(skip_serializing_if = "NicDhcp::is_empty", default)]
    pub(crate) dhcp: NicDhcp,
}

/// Checks what a description says of plugged interfaces.
pub(super) fn check(plugged: &[PluggedInterface], plan: &VmPlan) -> Result<(), String> {
    if plugged.len() + plan.nics.len() > MOST_NICS {
        return Err("interfaces: the VM has too many".into());
    }
    let mut names: HashSet<&str> = plan.nics.iter().map(|nic| &*nic.name).collect();
    let (mut devices, mut slots) = (HashSet::new(), HashSet::new());
    for (n, interface) in plugged.iter().enumerate() {
        let PluggedInterface {
            name,
            device,
            mac,
            queues,
            pci_slot,
            ..
        } = interface;
        let wrong = if !is_name(name) || !names.insert(name) {
            "name: it is not a name of its own"
        } else if DeviceNames::for_nic(device).is_err() || !devices.insert(device) {
            "device: it is not a name of a device of its own"
        } else if !mac.is_unicast() {
            "mac: it is not the address of a station"
        } else if !QUEUES.contains(queues) {
            "queues: it is not 1 to 256"
        } else if !SLOTS.contains(pci_slot) || !slots.insert(pci_slot) {
            "pciSlot: it is not a slot of its own"
        } else {
            continue;
        };
        return Err(format!("interfaces[{n}].{wrong}"));
    }
    Ok(())
}
