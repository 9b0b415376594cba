//! The state of the root bus itself across a snapshot. Each function is a component of its own.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};

use super::{PciRoot, SLOTS};
use crate::component::{Bytes, Component, ComponentState, RestoreError, SaveError, check};
use crate::pci::config::reg;
use crate::pci::config_ports::IMPLEMENTED;
use crate::pci::device::PciDevice;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RootState {
    /// The address register of configuration mechanism #1.
    config_address: u32,
    /// Configuration space of the host bridge.
    bridge: Bytes,
    /// The functions by slot, the bridge included: vendor ID in the low half, device ID in the high half.
    functions: BTreeMap<u8, u32>,
}

impl PciRoot {
    fn functions(&self) -> BTreeMap<u8, u32> {
        let id = |slot: u8| {
            let mut id = [0; 4];
            self.function(slot)?.config_read(reg::VENDOR, &mut id);
            Some((slot, u32::from_le_bytes(id)))
        };
        (0..SLOTS).filter_map(id).collect()
    }
}

/// The functions are reset and restored before: the bus then maps their BARs where they are now.
impl Component for PciRoot {
    fn reset(&self) {
        self.config_address.store(0, Relaxed);
        self.bridge.reset();
        self.refresh();
    }

    fn save(&self) -> Result<ComponentState, SaveError> {
        ComponentState::new(&RootState {
            config_address: self.config_address.load(Relaxed),
            bridge: self.bridge.save(),
            functions: self.functions(),
        })
    }

    fn restore(&self, state: &ComponentState) -> Result<(), RestoreError> {
        let state: RootState = state.parse()?;
        let implemented = state.config_address & !IMPLEMENTED == 0;
        check(implemented, "config_address", "has reserved bits")?;
        let same = state.functions == self.functions();
        check(same, "functions", "are others, or in other slots")?;
        self.bridge.restore(&state.bridge, "bridge")?;
        self.config_address.store(state.config_address, Relaxed);
        self.refresh();
        Ok(())
    }
}
