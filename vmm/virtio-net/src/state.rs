//! The state of the device across a snapshot. The frames in its taps, and its counters, are not a part of it. The taps
//! get their settings when the device is activated.

use std::sync::Arc;

use husk_devices::component::{Bytes, ComponentState, RestoreError, SaveError, check};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_net::VIRTIO_NET_F_CTRL_VLAN;

use crate::config::GUEST_OFFLOADS;
use crate::control_state::ControlState;
use crate::device::Net;
use crate::filter::{Filter, Mode, Table, Vlans};
use crate::mac::{MAC_TABLE_SIZE, Mac};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetState {
    /// MAC address of the device: the driver can set another.
    mac: Mac,
    /// The link is up.
    link: bool,
    /// The driver was asked to announce its addresses, and has not done so.
    announce: bool,
    /// State that the driver set; none before it was ready.
    driver: Option<DriverState>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DriverState {
    /// Number of queue pairs in use.
    pairs: u16,
    /// Guest offloads, by feature bit.
    offloads: u64,
    /// Receive modes, a bit for each command of section 5.1.6.5.1.
    modes: u8,
    unicast: TableState,
    multicast: TableState,
    /// The VLANs whose frames are received: 4096 bits. None without VIRTIO_NET_F_CTRL_VLAN.
    vlans: Option<Bytes>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TableState {
    addresses: Vec<Mac>,
    /// The driver set more addresses than the table keeps.
    overflow: bool,
}

impl TableState {
    fn of(table: &Table) -> Self {
        Self {
            addresses: table.addresses.clone(),
            overflow: table.overflow,
        }
    }

    fn table(self) -> Table {
        Table::new(self.addresses, self.overflow)
    }
}

pub(crate) fn save(net: &Net) -> Result<ComponentState, SaveError> {
    let vlans = |vlans: &Vlans| Bytes(vlans.0.iter().flat_map(|word| word.to_le_bytes()).collect());
    let driver = net.state.as_ref().map(|state| DriverState {
        pairs: state.pairs,
        offloads: state.offloads,
        modes: state.filter.modes,
        unicast: TableState::of(&state.filter.unicast),
        multicast: TableState::of(&state.filter.multicast),
        vlans: state.filter.vlans.as_deref().map(vlans),
    });
    let shared = &net.resources.shared;
    ComponentState::new(&NetState {
        mac: shared.mac(),
        link: shared.link(),
        announce: shared.announcing(),
        driver,
    })
}

pub(crate) fn restore(net: &mut Net, state: &ComponentState, features: u64) -> Result<(), RestoreError> {
    let state: NetState = state.parse()?;
    // As a driver may set it.
    let station = state.mac[0] & 1 == 0 && state.mac != [0; 6];
    check(
        station || state.mac == net.mac,
        "device.mac",
        "is no address of a station",
    )?;
    let driver = match state.driver {
        Some(driver) => Some(driver_state(net, driver, state.mac, features)?),
        None => None,
    };
    let shared = &net.resources.shared;
    // The host may take down the link of a device that is restored, before its driver sends a frame.
    shared.restore(state.mac, state.link && shared.link(), state.announce);
    net.state = driver;
    Ok(())
}

fn driver_state(
    net: &Net,
    saved: DriverState,
    mac: Mac,
    features: u64,
) -> Result<ControlState, RestoreError> {
    let exist = (1..=net.resources.taps.len()).contains(&usize::from(saved.pairs));
    check(
        exist,
        "device.driver.pairs",
        "is not a number of pairs of the device",
    )?;
    let accepted = saved.offloads & !(features & GUEST_OFFLOADS) == 0;
    check(
        accepted,
        "device.driver.offloads",
        "has one that the driver has not accepted",
    )?;
    check(
        saved.modes & !Mode::ALL == 0,
        "device.driver.modes",
        "has an unknown bit",
    )?;
    for (field, table) in [
        ("device.driver.unicast", &saved.unicast),
        ("device.driver.multicast", &saved.multicast),
    ] {
        let fits = table.addresses.len() <= MAC_TABLE_SIZE;
        check(fits, field, "has more addresses than the table")?;
    }
    let filters_vlans = features & 1 << VIRTIO_NET_F_CTRL_VLAN != 0;
    let same = saved.vlans.is_some() == filters_vlans;
    check(same, "device.driver.vlans", "contradicts the accepted features")?;
    let vlans = match saved.vlans {
        Some(bits) => {
            let bits = bits.array::<512>("device.driver.vlans")?;
            let (words, _) = bits.as_chunks();
            let words: [u64; 64] = std::array::from_fn(|at| u64::from_le_bytes(words[at]));
            Some(Box::new(Vlans(words)))
        }
        None => None,
    };
    let filter = Filter {
        mac,
        modes: saved.modes,
        unicast: saved.unicast.table(),
        multicast: saved.multicast.table(),
        vlans,
    };
    Ok(ControlState {
        features,
        filter: Arc::new(filter),
        pairs: saved.pairs,
        offloads: saved.offloads,
    })
}
