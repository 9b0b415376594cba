//! VMIs of the node whose launcher pods do not run under Husk.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::watch;

/// Namespaces and names of the VMIs, as `NAMESPACE/NAME`.
pub type ForeignVmis = watch::Receiver<BTreeSet<String>>;

/// The list that all actors write.
#[derive(Debug, Clone)]
pub(super) struct ForeignList(Arc<watch::Sender<BTreeSet<String>>>);

impl ForeignList {
    pub(super) fn new() -> (ForeignList, ForeignVmis) {
        let (sender, receiver) = watch::channel(BTreeSet::new());
        (ForeignList(Arc::new(sender)), receiver)
    }

    /// An entry of one VMI, which is not in the list yet.
    pub(super) fn entry(&self) -> ForeignEntry {
        ForeignEntry {
            list: self.clone(),
            name: None,
        }
    }
}

/// One VMI's entry. Dropping the value removes it.
#[derive(Debug)]
pub(super) struct ForeignEntry {
    list: ForeignList,
    name: Option<String>,
}

impl ForeignEntry {
    /// Puts the VMI into the list. Returns false if it is there already.
    pub(super) fn insert(&mut self, name: &str) -> bool {
        if self.name.is_some() {
            return false;
        }
        self.name = Some(name.to_owned());
        self.list.0.send_if_modified(|list| list.insert(name.to_owned()))
    }

    /// Takes the VMI from the list.
    pub(super) fn remove(&mut self) {
        if let Some(name) = self.name.take() {
            self.list.0.send_if_modified(|list| list.remove(&name));
        }
    }
}

impl Drop for ForeignEntry {
    fn drop(&mut self) {
        self.remove();
    }
}
