//! Panics of guests, counted since the agent's start. They outlast their VMs, which mostly end with them.

use std::collections::BTreeMap;

use tokio::sync::watch;

use super::object::Vmi;

/// Namespace and name of a VMI.
pub type VmiName = (String, String);

/// The counts of a node's VMIs.
#[derive(Debug, Clone, Default)]
pub struct GuestPanics(watch::Sender<BTreeMap<VmiName, u64>>);

impl GuestPanics {
    pub(super) fn add(&self, vmi: &Vmi, count: u64) {
        let name = (vmi.namespace(), vmi.name());
        self.0
            .send_modify(|counts| *counts.entry(name).or_default() += count);
    }

    /// The count of each VMI whose guest has panicked.
    pub fn all(&self) -> BTreeMap<VmiName, u64> {
        self.0.borrow().clone()
    }
}
