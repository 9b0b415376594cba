//! Limits what each owner may have at a time, such as the connections of a peer, so that one cannot use up all.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

/// The number of permits of each owner.
#[derive(Debug)]
pub struct OwnerLimits<K> {
    limit: usize,
    taken: Arc<Mutex<HashMap<K, usize>>>,
}

/// A permit of an owner, until it is dropped.
#[derive(Debug)]
pub struct Permit<K: Eq + Hash> {
    limits: OwnerLimits<K>,
    owner: K,
}

impl<K> Clone for OwnerLimits<K> {
    fn clone(&self) -> Self {
        OwnerLimits {
            limit: self.limit,
            taken: Arc::clone(&self.taken),
        }
    }
}

impl<K: Clone + Eq + Hash> OwnerLimits<K> {
    /// At most `limit` permits for each owner.
    pub fn new(limit: usize) -> OwnerLimits<K> {
        OwnerLimits {
            limit,
            taken: Arc::default(),
        }
    }

    /// Takes a permit; `None` if `owner` is at its limit.
    pub fn take(&self, owner: K) -> Option<Permit<K>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.get(&owner).copied().unwrap_or(0);
        if count >= self.limit {
            return None;
        }
        taken.insert(owner.clone(), count + 1);
        Some(Permit {
            limits: self.clone(),
            owner,
        })
    }
}

impl<K: Eq + Hash> Drop for Permit<K> {
    fn drop(&mut self) {
        let mut taken = self.limits.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match taken.get_mut(&self.owner) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(taken.remove(&self.owner)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_owner_has_a_limit_of_connections() {
        let limits = OwnerLimits::new(2);
        let first = limits.take("one").unwrap();
        let _second = limits.take("one").unwrap();
        assert!(limits.take("one").is_none());
        let last = limits.take("other").unwrap();
        drop(first);
        let _third = limits.take("one").unwrap();
        assert!(limits.take("one").is_none());
        drop(last);
        assert_eq!(limits.taken.lock().unwrap().len(), 1);
    }
}
