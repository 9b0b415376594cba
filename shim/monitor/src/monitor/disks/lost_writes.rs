//! Volumes that were removed although their last flush failed.

use std::collections::BTreeMap;

/// Maximum number of volumes. More are only logged.
const VOLUMES: usize = 64;

/// Flush errors that no caller has got yet, by volume.
#[derive(Debug, Default)]
pub(super) struct LostWrites(BTreeMap<String, String>);

impl LostWrites {
    /// Adds a volume. The error is short.
    pub(super) fn add(&mut self, name: &str, flush_error: &str) {
        if self.0.len() < VOLUMES || self.0.contains_key(name) {
            self.0.insert(name.to_owned(), flush_error.to_owned());
        }
    }

    pub(super) fn forget(&mut self, name: &str) {
        self.0.remove(name);
    }

    pub(super) fn take(&mut self) -> BTreeMap<String, String> {
        std::mem::take(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_volumes_is_limited() {
        let mut lost = LostWrites::default();
        for number in 0..2 * VOLUMES {
            lost.add(&format!("v{number}"), "it is lost");
        }
        lost.add("v0", "again");
        lost.forget("v1");
        let taken = lost.take();
        assert_eq!((taken.len(), taken["v0"].as_str()), (VOLUMES - 1, "again"));
        assert!(lost.take().is_empty());
    }
}
