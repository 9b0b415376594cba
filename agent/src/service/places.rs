//! Places of connections, limited for each address: nobody can take those of all others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// The number of connections of each address.
#[derive(Debug, Clone)]
pub(super) struct PeerPlaces {
    limit: usize,
    taken: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// The place of one connection.
#[derive(Debug)]
pub(super) struct PeerPlace {
    places: PeerPlaces,
    peer: IpAddr,
}

impl PeerPlaces {
    /// At most `limit` places for each address.
    pub(super) fn new(limit: usize) -> PeerPlaces {
        PeerPlaces {
            limit,
            taken: Arc::default(),
        }
    }

    /// Reserves a place for a connection; `None` if `peer` is at its limit.
    pub(super) fn take(&self, peer: IpAddr) -> Option<PeerPlace> {
        // The socket may be for IPv6 and IPv4.
        let peer = peer.to_canonical();
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.get(&peer).copied().unwrap_or(0);
        if count >= self.limit {
            return None;
        }
        taken.insert(peer, count + 1);
        Some(PeerPlace {
            places: self.clone(),
            peer,
        })
    }
}

impl Drop for PeerPlace {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match taken.get_mut(&self.peer) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(taken.remove(&self.peer)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_has_a_limit_of_connections() {
        let places = PeerPlaces::new(2);
        let (one, mapped, other) = ("10.0.0.1", "::ffff:10.0.0.1", "10.0.0.2");
        let take = |peer: &str| places.take(peer.parse().unwrap());
        let first = take(one).unwrap();
        let _second = take(mapped).unwrap();
        assert!(take(one).is_none());
        let last = take(other).unwrap();
        drop(first);
        let _third = take(one).unwrap();
        assert!(take(mapped).is_none());
        drop(last);
        assert_eq!(places.taken.lock().unwrap().len(), 1);
    }
}
