//! Limits the connections of each owner, such as a peer's address, so that one owner cannot use up all of them.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

/// The number of connections of each owner.
#[derive(Debug)]
pub struct Places<K> {
    limit: usize,
    taken: Arc<Mutex<HashMap<K, usize>>>,
}

/// The place of one connection.
#[derive(Debug)]
pub struct Place<K: Eq + Hash> {
    places: Places<K>,
    owner: K,
}

impl<K> Clone for Places<K> {
    fn clone(&self) -> Self {
        Places {
            limit: self.limit,
            taken: Arc::clone(&self.taken),
        }
    }
}

impl<K: Clone + Eq + Hash> Places<K> {
    /// At most `limit` places for each owner.
    pub fn new(limit: usize) -> Places<K> {
        Places {
            limit,
            taken: Arc::default(),
        }
    }

    /// Reserves a place for a connection; `None` if `owner` is at its limit.
    pub fn take(&self, owner: K) -> Option<Place<K>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.get(&owner).copied().unwrap_or(0);
        if count >= self.limit {
            return None;
        }
        taken.insert(owner.clone(), count + 1);
        Some(Place {
            places: self.clone(),
            owner,
        })
    }
}

impl<K: Eq + Hash> Drop for Place<K> {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
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
        let places = Places::new(2);
        let first = places.take("one").unwrap();
        let _second = places.take("one").unwrap();
        assert!(places.take("one").is_none());
        let last = places.take("other").unwrap();
        drop(first);
        let _third = places.take("one").unwrap();
        assert!(places.take("one").is_none());
        drop(last);
        assert_eq!(places.taken.lock().unwrap().len(), 1);
    }
}
