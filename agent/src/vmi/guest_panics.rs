//! Panics of guests, counted since the agent's start. They outlast their VMs, which mostly end with them.
//!
//! Guests can panic under any number of VMI names: beyond [`MAX_NAMES`], the name whose guest has not panicked for the
//! longest time is forgotten.

use std::collections::BTreeMap;

use tokio::sync::watch;

use super::object::Vmi;

/// Namespace and name of a VMI.
pub type VmiName = (String, String);

/// Most names with a count.
const MAX_NAMES: usize = 1000;

/// The counts of a node's VMIs.
#[derive(Debug, Clone, Default)]
pub struct GuestPanics(watch::Sender<Counts>);

#[derive(Debug, Default)]
struct Counts {
    /// The count of each name, and the number of its last change.
    names: BTreeMap<VmiName, (u64, u64)>,
    changes: u64,
}

impl Counts {
    fn add(&mut self, name: VmiName, count: u64) {
        self.changes += 1;
        let (total, changed) = self.names.entry(name).or_default();
        *total += count;
        *changed = self.changes;
        if self.names.len() > MAX_NAMES
            && let Some(oldest) = self.names.iter().min_by_key(|(_, (_, changed))| *changed)
        {
            let oldest = oldest.0.clone();
            self.names.remove(&oldest);
        }
    }
}

impl GuestPanics {
    pub(super) fn add(&self, vmi: &Vmi, count: u64) {
        let name = (vmi.namespace(), vmi.name());
        self.0.send_modify(|counts| counts.add(name, count));
    }

    /// The count of each VMI whose guest has panicked.
    pub fn all(&self) -> BTreeMap<VmiName, u64> {
        let counts = self.0.borrow();
        let names = counts.names.iter();
        names.map(|(name, (total, _))| (name.clone(), *total)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_that_has_not_changed_for_longest_is_forgotten() {
        let name = |number: usize| ("default".to_owned(), format!("vm{number}"));
        let mut counts = Counts::default();
        for number in 0..MAX_NAMES {
            counts.add(name(number), 1);
        }
        counts.add(name(0), 1);
        counts.add(name(MAX_NAMES), 1);
        assert_eq!(counts.names.len(), MAX_NAMES);
        assert_eq!(counts.names[&name(0)].0, 2);
        assert!(!counts.names.contains_key(&name(1)));
    }
}
